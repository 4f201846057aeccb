"""Privacy profiles of spherical noise to 15 digits, by two routes that share no formula with the package or each other.

1. Balls: a radially decreasing density is a mixture of uniform balls, so with `phi(R') = phi(R) + epsilon`

       delta = E_R[ vol(B(0, R) without B(v, R')) / vol B(0, R) ],

   where (R/c)^p is gamma distributed, of shape k/p with probability 1 - k/M and of shape k/p + 1 with probability k/M.
   The volume is a difference of spherical caps, that is, of incomplete beta functions; 30 digits outlast the
   cancellation.
2. Plane: the two-dimensional integral of (g(r) - e^epsilon g(r'))_+ over r and the angle, and the same with r and r'
   exchanged, which is the other direction of the divergence; for dimensions 2 to 10.

Run `python tests/golden/spherical.py` to write spherical.json beside this file; it takes a few minutes.
"""

import json
import math
from pathlib import Path

import mpmath as mp

# name: dimension, k, p, scale, radius, epsilon
CASES = {
    "laplace": (1, 1, 1, 1, 1, 0.5),
    "gaussian on a line": (1, 1, 2, 4, 1, 0.5),
    "singular on a line": (1, 0.7, 1.5, 3, 1, 0.5),
    "l2 in the plane": (2, 2, 1, 0.5, 1, 1.5),
    "near l2 in the plane": (2, 2, 1.1, 1.2, 1, 1),
    "r1smg in the plane": (2, 1, 2, 50, 1, 0.1),
    "heavy tail in the plane": (2, 1.2, 0.6, 2, 1, 0.5),
    "large shift in the plane": (2, 2, 1.5, 1, 12, 20),
    "gaussian in space": (3, 3, 2, 6, 1, 1),
    "l2 in space": (3, 3, 1, 1, 1, 0.25),
    "between in space": (3, 2.5, 1.5, 8, 1, 0.5),
    "tiny in space": (3, 3, 1.5, 1e6, 1, 1e-6),
    "light tail": (4, 4, 3, 4, 1, 1),
    "near l2": (5, 5, 1.01, 1, 1, 0.9),
    "singular with heavy tail": (5, 0.5, 0.5, 1000, 1, 2),
    "lightest tail": (7, 6, 8, 3, 1, 2),
    "r1smg, theory table 1": (10, 1, 2, math.sqrt(2 * 983.66), 1, 0.05),
    "ten dimensions": (10, 10, 1.03, 0.5, 1, 1),
    "ten dimensions, small delta": (10, 9.5, 1.5, 4.2, 1, 1),
    "twenty dimensions": (20, 19, 1.07, 1.2, 1, 0.5),
    "fifty dimensions": (50, 50, 1.06, 0.6, 1, 1),
    "r1smg, theory table 2": (100, 1, 2, math.sqrt(2 * 532.65), 1, 0.005),
    "thousand dimensions": (1000, 1000, 1.08, 0.2, 1, 1),
    "r1smg, theory table 3": (7921, 1, 2, math.sqrt(2 * 201055), 1, 1e-5),
    "r1smg calibrated": (7921, 1, 2, 1e8, 1, 0.5),
}
LARGEST_PLANE = 10


class Member:
    """phi, its inverse and the places where the integrands are not smooth; the scale is 1 and the shift s."""

    def __init__(self, dimension, k, p, scale, radius, epsilon):
        self.M, self.k, self.p, self.epsilon = dimension, mp.mpf(k), mp.mpf(p), mp.mpf(epsilon)
        self.s = mp.mpf(radius) / mp.mpf(scale)

    def phi(self, r):
        return r**self.p + ((self.M - self.k) * mp.log(r) if self.k < self.M else 0)

    def raised(self, r, loss):
        """The radius at which phi is larger by the loss (or smaller, if it is negative); None if there is none."""
        target = self.phi(r) + loss
        if self.k == self.M:
            return target ** (1 / self.p) if target > 0 else None
        log_radius = mp.log(r)
        for _ in range(200):  # Newton in log r: the function is convex there
            power = mp.exp(self.p * log_radius)
            change = ((self.M - self.k) * log_radius + power - target) / (self.M - self.k + self.p * power)
            log_radius -= change
            if abs(change) < mp.mpf(10) ** (5 - mp.mp.dps) * max(1, abs(log_radius)):
                return mp.exp(log_radius)
        raise ArithmeticError("no inverse")

    def window(self, digits):
        """log radii between which all but 10^-digits of the probability lies."""
        shape = self.k / self.p
        low, high = mp.log(shape), mp.log(shape)
        while mp.gammainc(shape, 0, mp.exp(low), regularized=True) > mp.mpf(10) ** -digits:
            low -= 1 / mp.sqrt(shape)
        while mp.gammainc(shape + 1, mp.exp(high), mp.inf, regularized=True) > mp.mpf(10) ** -digits:
            high += 1 / mp.sqrt(shape)
        return low / self.p, high / self.p

    def breaks(self, low, high, functions, panels):
        """Equal panels, and every zero of the functions of log r."""
        points = [low + (high - low) * i / panels for i in range(panels + 1)]
        fine = [low + (high - low) * i / 400 for i in range(401)]
        for function in functions:
            values = [function(mp.exp(y)) for y in fine]
            for i in range(400):
                if (values[i] > 0) != (values[i + 1] > 0):
                    bracket = (fine[i], fine[i + 1])
                    points.append(mp.findroot(lambda y, f=function: f(mp.exp(y)), bracket, solver="anderson"))
        return sorted(points)


def by_balls(member, panels):
    m, s = member.M, member.s
    low, high = member.window(35)

    def cap(radius, distance):
        """The part of a ball beyond a plane."""
        half = mp.betainc(mp.mpf(m + 1) / 2, mp.mpf(1) / 2, 0, 1 - (distance / radius) ** 2, regularized=True) / 2
        return half if distance >= 0 else 1 - half

    def outside(radius):
        larger = member.raised(radius, member.epsilon)
        if larger >= radius + s:
            return mp.mpf(0)
        if larger <= s - radius:
            return mp.mpf(1)
        distance = (s**2 + radius**2 - larger**2) / (2 * s)
        return 1 - cap(radius, distance) - (larger / radius) ** m * cap(larger, s - distance)

    shape = member.k / member.p

    def integrand(y):
        power = mp.exp(member.p * y)
        singular = (1 - member.k / m) * mp.exp(shape * member.p * y - power - mp.loggamma(shape))
        regular = member.k / m * mp.exp((shape + 1) * member.p * y - power - mp.loggamma(shape + 1))
        return member.p * (singular + regular) * outside(mp.exp(y))

    def away(r):
        return member.phi(r + s) - member.phi(r) - member.epsilon

    def towards(r):
        return member.phi(s - r) - member.phi(r) - member.epsilon if r < s else mp.mpf(-1)

    return mp.quad(integrand, member.breaks(low, high, (away, towards), panels))


def by_plane(member, reverse):
    """(g(r) - e^epsilon g(r'))_+, or (g(r') - e^epsilon g(r))_+, times the measure, over log r and the angle."""
    m, s, sign = member.M, member.s, -1 if reverse else 1
    low, high = member.window(24)
    if reverse:  # now the noise is around v: leave room on both sides
        low, high = min(low, mp.log(s) - 30), mp.log(mp.exp(high) + s)
    norm = member.p / mp.gamma(member.k / member.p) / mp.beta(mp.mpf(1) / 2, mp.mpf(m - 1) / 2)

    def over_angles(y):
        r = mp.exp(y)
        edge = member.raised(r, sign * member.epsilon)
        if edge is None:
            return mp.mpf(0)
        cosine = (r**2 + s**2 - edge**2) / (2 * r * s)
        angle = mp.acos(min(max(cosine, -1), 1))
        first, last = (mp.mpf(0), angle) if reverse else (angle, mp.pi)
        if first == last:
            return mp.mpf(0)

        def integrand(t):
            other = mp.sqrt((r - s) ** 2 + 4 * r * s * mp.sin(t / 2) ** 2)
            loss = member.phi(other) - member.phi(r)
            gain = mp.exp(-loss) - mp.exp(member.epsilon) if reverse else -mp.expm1(member.epsilon - loss)
            return gain * mp.sin(t) ** (m - 2)

        return norm * mp.exp(member.k * y - r**member.p) * mp.quad(integrand, [first, last])

    def towards(r):
        return member.phi(abs(s - r)) - member.phi(r) - sign * member.epsilon if r != s else mp.mpf(-1)

    def away(r):
        return member.phi(r + s) - member.phi(r) - sign * member.epsilon

    points = member.breaks(low, high, (towards, away), 12)
    if reverse:
        points = sorted([*points, mp.log(s)])
    return mp.quad(over_angles, points)


def main():
    values = {}
    for name, case in CASES.items():
        member = Member(*case)
        mp.mp.dps = 30
        value, again = by_balls(member, 8), by_balls(member, 11)
        assert abs(value / again - 1) < 1e-15, (name, value, again)
        print(name, mp.nstr(value, 20), flush=True)
        if 2 <= member.M <= LARGEST_PLANE:
            mp.mp.dps = 15
            for reverse in (False, True):
                other = by_plane(member, reverse)
                agreement = abs(other / value - 1)
                direction = "reverse" if reverse else "forward"
                print("    plane", direction, mp.nstr(other, 15), mp.nstr(agreement, 2), flush=True)
                # the reverse integrand is singular at n = v for k < M, where plain quadrature gains few digits
                assert agreement < (1e-5 if reverse and member.k < member.M else 1e-9), name
        dimension, k, p, scale, radius, epsilon = case
        values[name] = {
            "dimension": dimension,
            "k": k,
            "p": p,
            "scale": scale,
            "radius": radius,
            "epsilon": epsilon,
            "delta": mp.nstr(value, 20),
        }
    Path(__file__).with_suffix(".json").write_text(json.dumps(values, indent=1) + "\n")


if __name__ == "__main__":
    main()
