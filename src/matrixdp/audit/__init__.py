"""Black-box tests of a claimed (epsilon, delta): how well outputs on two neighbouring inputs can be told apart.

An audit can reject a claim, with a stated probability of a false alarm; it can never prove one. Certificates rest on
proofs.
"""

from matrixdp.audit.auditing import audit, audit_law, audit_scores
from matrixdp.audit.result import AuditResult

__all__ = ["AuditResult", "audit", "audit_law", "audit_scores"]
