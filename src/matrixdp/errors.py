"""Every error that matrixdp raises on purpose, in one tree."""


class MatrixDPError(Exception):
    """Anything that matrixdp refuses or cannot do."""


class InvalidInput(MatrixDPError, ValueError):
    """An argument cannot be used; the message names it and says what to do instead.

    The message shows numbers and words of public arguments. Of everything else it gives only the place and the kind:
    never a cell of the data, a header or a label. Whether it is raised may depend on the data; no guarantee covers
    that.
    """


class NotApplicable(InvalidInput):
    """A mechanism has no theorem for this setting; another mechanism may."""


class NotCertifiable(MatrixDPError):
    """No finite guarantee can be proven for this noise on this sensitivity set."""


class GuaranteeViolated(MatrixDPError):
    """The noise is known not to keep the budget."""


class BudgetExceeded(MatrixDPError):
    """The spend would exceed the budget; nothing was spent or released."""


class MissingExtra(MatrixDPError, ImportError):
    """A package that this part of matrixdp needs is not installed; the message has the command that installs it."""


class NumericalFailure(MatrixDPError):
    """A computation lost too much precision for its result to be trusted."""


class LedgerError(MatrixDPError):
    """The ledger cannot be read, written or trusted; charge no release to it."""


class StreamError(MatrixDPError):
    """The state of a stream, a training or federated rounds cannot be used or trusted; nothing was released."""
