"""Elementary functions as vector expressions.

In: a TIR expression. Out: an expression that the vectoriser keeps in
vector registers.

LLVM turns exp, tanh, erf and log of a vector into one library call per lane; the f32 versions here are polynomials
instead, sine and cosine (trigonometry.py) and powers (powers.py) too. Errors, measured in the tests: exp, log, sqrt,
rsqrt and pow 1.3 ulp, sigmoid, sin and cos 2 ulp, tanh and erf 5e-7 relative. All of them keep nan, and go to the right
limit (0, 1, inf) for infinite and very large operands; exp and pow give denormals. f64 uses the library, and so do sin
and cos without fused multiply-adds. Vectors of AVX-512 have instructions of their own (lanes.py) for exponents,
mantissas and roots. So results may differ in the last bit between vectors and the elements left over behind the last
vector. Coefficients: Eigen (rational tanh, erf), our own fits (exp, log). Normal results are computed by normal
numbers: a processor takes ten to thirty times as long to make a denormal.

Comparisons are written so that a nan operand falls through to the result: `select(x > limit, limit, x)` keeps it, TIR's
min and max do not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tvm import tirx

from .emit import VECTOR, Emitter, Expr, dtype_name, i32, literal
from .lanes import Wide, mend
from .powers import power
from .trigonometry import cosine, sine

# e^r = 1 + r + r^2 * (these), for r up to log(2)/2: relative error 3.1e-9, a least-squares fit with weights made even.
_EXP = (1.3814532257e-3, 8.3687459217e-3, 4.1668390952e-2, 1.666652039e-1, 4.9999993431e-1)
# Here the exponent of the power of two becomes 0, and with it the result.
_EXP_LEAST = -127 * math.log(2)
# Below this number the result is not a normal number.
_EXP_NORMAL = -87.33654
_ROUNDER = 1.5 * 2**23 + 127
_ROUNDER_TWICE = 1.5 * 2**23 + 254
# 2^r for |r| <= 1/2, fitted for the least relative error (2e-9 before rounding).
_EXP2 = (1.5345812e-4, 1.3399931e-3, 9.618489e-3, 5.5503286e-2, 2.4022646e-1, 6.9314718e-1, 1.0)
# Added to a float of moderate size, it leaves the nearest whole number in the last bits.
_ROUND = 12582912.0
# log(1 + r) = r + r^2 * (these), for 1 + r within sqrt(1/2) .. sqrt(2): relative error 4.1e-9.
_LOG = (
    -7.62185593572e-2,
    1.29044939625e-1,
    -1.3242985042e-1,
    1.41818142116e-1,
    -1.66090814187e-1,
    2.00019745552e-1,
    -2.50015830516e-1,
    3.3333325681e-1,
    -4.99999883447e-1,
)
# The same within 3/4 .. 3/2: 4.8e-9.
_LOG_WIDE = (
    -4.49096086024e-2,
    1.04483315666e-1,
    -1.31622323393e-1,
    1.44820616072e-1,
    -1.66477671178e-1,
    1.99906067442e-1,
    -2.50000545818e-1,
    3.33334554434e-1,
    -5.00000008227e-1,
)
# The bits of sqrt(1/2).
_SQRT_HALF = 0x3F3504F3
# The bits of 2^-100.
_SQRT_LEAST = 0x0D800000
_TANH_UP = (
    -2.76076847742355e-16,
    2.00018790482477e-13,
    -8.60467152213735e-11,
    5.12229709037114e-08,
    1.48572235717979e-05,
    6.37261928875436e-04,
    4.89352455891786e-03,
)
_TANH_DOWN = (1.19825839466702e-06, 1.18534705686654e-04, 2.26843463243900e-03, 4.89352518554385e-03)
_ERF_UP = (
    -2.72614225801306e-10,
    2.77068142495902e-08,
    -2.10102402082508e-06,
    -5.69250639462346e-05,
    -7.34990630326855e-04,
    -2.95459980854025e-03,
    -1.60960333262415e-02,
)
_ERF_DOWN = (
    -1.45660718464996e-05,
    -2.13374055278905e-04,
    -1.68282697438203e-03,
    -7.37332916720468e-03,
    -1.42647390514189e-02,
)

_ATAN = (8.05374449538e-2, -1.38776856032e-1, 1.99777106478e-1, -3.33329491539e-1)
_TANH_SERIES = (-929569 / 638512875, 21844 / 6081075, -1382 / 155925, 62 / 2835, -17 / 315, 2 / 15, -1 / 3)
_GELU = math.sqrt(2 / math.pi)


def _f32(value: float) -> Expr:
    return literal(value, "f32")


def _like(x: Expr, value: float) -> Expr:
    return tirx.FloatImm(dtype_name(x), value)


def _is_f32(x: Expr) -> bool:
    return dtype_name(x) == "float32"


class Functions:
    """Elementary functions that name intermediate results: TIR expressions are trees, and a value used twice would be
    computed twice. `rounded` gives an f32 as memory of a 16-bit float would hold it. `lanes` are those of the
    processor: 16 with AVX-512, 8 with AVX2 and fused multiply-adds."""

    def __init__(self, emit: Emitter, lanes: int = 1) -> None:
        self.emit, self.bind, self.rounded = emit, emit.bind, emit.rounded
        self._wide = Wide(emit) if lanes == 16 else None
        self._is_fused = lanes >= 8

    def _instructions(self, x: Expr) -> Wide | None:
        """Return AVX-512's own instructions, where x is one lane of 16 floats."""
        return self._wide if self._wide is not None and _is_f32(x) and self._wide.usable() else None

    def row_in_force(
        self, dims: tuple[int, ...], read: Callable[[Expr, Expr], Expr], begun: Callable[[Expr], Expr]
    ) -> Sequence[Expr]:
        """Choose the last row of a short table whose first column fulfils a condition; the first row where none
        does."""
        rows, columns = dims
        table = [[read(i32(r), i32(c)) for c in range(columns)] for r in range(rows)]
        chosen = table[0]
        for row in table[1:]:
            on = self.bind(begun(row[0]))
            chosen = [tirx.Select(on, a, b) for a, b in zip(row, chosen, strict=True)]
        return chosen

    def _horner(self, x: Expr, coefficients: tuple[float, ...]) -> Expr:
        value = _f32(coefficients[0])
        for c in coefficients[1:]:
            value = value * x + _f32(c)
        return self.bind(value)

    def _clamp(self, x: Expr, low: float, high: float) -> Expr:
        """Clamp x to limits; nan is kept."""
        x = self.bind(x)
        top = self.bind(tirx.Select(x > _like(x, high), _like(x, high), x))
        return self.bind(tirx.Select(top < _like(x, low), _like(x, low), top))

    def exp(self, x: Expr) -> Expr:
        if not _is_f32(x):
            return self.bind(tirx.exp(x))
        x = self.bind(x)
        # A result too small for a denormal is 0 without being computed: finding out takes as long as making one.
        none = x < _f32(-104)
        top = self.bind(tirx.Select(x > _f32(88.8), _f32(88.8), x))
        return self.bind(tirx.Select(none, _f32(0), self.exp_within(self.bind(tirx.Select(none, _f32(0), top)))))

    def exp_within(self, c: Expr) -> Expr:
        """Return e^c for c within -104 .. 88.8, or nan. Below -87.33 the result is a denormal."""
        if not _is_f32(c):
            return self.exp(c)
        wide = self._instructions(c)
        if wide is not None:
            _, n, r = self._split(c, _ROUND)
            return wide.scaled(self._horner(r, (*_EXP, 1.0, 1.0)), n)
        bits, r = self._powers_of_two(c, _ROUNDER_TWICE)
        # In two steps, so that results below 2^-126 are denormals and those past the largest float are inf.
        half = self.bind(bits >> 1)
        y = self._horner(r, (*_EXP, 1.0, 1.0))
        return self.bind(y * tirx.reinterpret("float32", half << 23) * tirx.reinterpret("float32", (bits - half) << 23))

    def exp_down(self, x: Expr) -> Expr:
        """Return e^x for x up to 88, in fewer steps: 0 where the result would be a denormal, so -inf gives 0; nan is
        kept. Wrong for larger x."""
        if not _is_f32(x):
            return self.exp(x)
        x = self.bind(x)
        c = self.bind(tirx.Select(x < _f32(_EXP_NORMAL), _f32(_EXP_LEAST), x))
        bits, r = self._powers_of_two(c, _ROUNDER)
        y = self._horner(r, (*_EXP, 1.0, 1.0))
        return self.bind(y * tirx.reinterpret("float32", bits << 23))

    def _powers_of_two(self, x: Expr, rounder: float) -> tuple[Expr, Expr]:
        """Return n as the low bits of the sum of x / log(2) and 1.5 * 2^23 plus a bias, and r: see _split."""
        t, _, r = self._split(x, rounder)
        return self.bind(tirx.reinterpret("int32", t)), r

    def _split(self, x: Expr, rounder: float) -> tuple[Expr, Expr, Expr]:
        """Return n + rounder, n and r with x = n * log(2) + r, |r| <= log(2) / 2."""
        t = self.bind(x * _f32(math.log2(math.e)) + _f32(rounder))
        n = self.bind(t - _f32(rounder))
        r = self.bind(x - n * _f32(0.693359375))
        return t, n, self.bind(r - n * _f32(-2.12194440e-4))

    def exp2(self, x: Expr) -> Expr:
        """Return 2^x for x up to 127; 0 below -126 in f32. Quicker than exp, and exactly 1 at 0."""
        if not _is_f32(x):
            return self.bind(tirx.exp2(x))
        x = self.bind(x)
        rounded = self.bind(x + _f32(_ROUND))
        whole = self.bind(rounded - _f32(_ROUND))
        y = self._horner(self.bind(x - whole), _EXP2)
        y = y * tirx.reinterpret("float32", (tirx.reinterpret("int32", rounded) << 23) + 0x3F800000)
        return self.bind(tirx.Select(x < _f32(-126), _f32(0), y))

    def log(self, x: Expr) -> Expr:
        if not _is_f32(x):
            return self.bind(tirx.log(x))
        x = self.bind(x)
        wide = self._instructions(x)
        if wide is not None:
            # Zeros, infinities and nan go their way through the exponent and the mantissa.
            m, e = wide.mantissa(x), wide.exponent(x)
            return self._log_of_parts(m, tirx.Select(m < _f32(1), e + _f32(1), e), _LOG_WIDE)
        tiny = x < _f32(1.1754944e-38)
        bits = self.bind(tirx.reinterpret("int32", self.bind(tirx.Select(tiny, x * _f32(8388608.0), x))))
        above = self.bind(bits - _SQRT_HALF)
        m = tirx.reinterpret("float32", bits - tirx.bitwise_and(above, -0x800000))
        y = self._log_of_parts(m, tirx.Cast("float32", above >> 23) - tirx.Select(tiny, _f32(23), _f32(0)), _LOG)
        y = tirx.Select(tirx.EQ(x, _f32(math.inf)), _f32(math.inf), y)
        y = tirx.Select(tirx.EQ(x, _f32(0)), _f32(-math.inf), y)
        # Negative numbers, and nan, which is not above 0 either.
        return self.bind(tirx.Select(x >= _f32(0), y, _f32(math.nan)))

    def _log_of_parts(self, m: Expr, e: Expr, coefficients: tuple[float, ...]) -> Expr:
        """Return log(m * 2^e). Next to 1, where the result is small, e is 0."""
        r = self.bind(m - _f32(1))
        y = self.bind(self.bind(r * r) * self._horner(r, coefficients) + r)
        return self.bind(self.bind(e) * _f32(math.log(2)) + y)

    def sqrt(self, x: Expr) -> Expr:
        x = self.bind(x)
        wide = self._instructions(x)
        if wide is None:
            return self.bind(tirx.sqrt(x))
        # x minus the square of an estimate is exact, if it is not too small. Roots of squares are exact.
        y = wide.inverse_root(x)
        s = self.bind(x * y)
        better = s + self.bind(x - s * s) * (y * _f32(0.5))
        bits = tirx.reinterpret("uint32", x) - tirx.IntImm("uint32", _SQRT_LEAST)
        rare = bits >= tirx.IntImm("uint32", 0x7F800000 - _SQRT_LEAST)
        return mend(self.emit, better, rare, tirx.sqrt, x, VECTOR)

    def rsqrt(self, x: Expr) -> Expr:
        x = self.bind(x)
        wide = self._instructions(x)
        if wide is None:
            return self.bind(_like(x, 1) / tirx.sqrt(x))
        y = wide.inverse_root(x)
        better = y + y * self.bind(_f32(0.5) - self.bind(x * y) * self.bind(y * _f32(0.5)))
        # 0 and inf are right already; the step would make them nan.
        return self.bind(tirx.Select(tirx.EQ(y + y, y), y, better))

    def sin(self, x: Expr) -> Expr:
        return sine(self.emit, x) if _is_f32(x) and self._is_fused else self.bind(tirx.sin(x))

    def cos(self, x: Expr) -> Expr:
        return cosine(self.emit, x) if _is_f32(x) and self._is_fused else self.bind(tirx.cos(x))

    def atan(self, x: Expr) -> Expr:
        """Return the arctangent by a polynomial on |r| <= tan(pi / 8) (Cephes).

        The reduction is atan(x) = pi/2 - atan(1 / x) = pi/4 + atan((x - 1) / (x + 1)).
        """
        x = self.bind(x)
        if not _is_f32(x):
            return self.bind(tirx.atan(x))
        size = self.bind(tirx.abs(x))
        far, middle = size > _f32(2.414213562373095), size > _f32(0.4142135623730950)
        # One division; the operands not chosen may be infinite, and the chosen divisor is never zero.
        above = self.bind(tirx.Select(far, _f32(-1), tirx.Select(middle, size - _f32(1), size)))
        below = self.bind(tirx.Select(far, size, tirx.Select(middle, size + _f32(1), _f32(1))))
        r = self.bind(above / below)
        z = self.bind(r * r)
        start = tirx.Select(far, _f32(math.pi / 2), tirx.Select(middle, _f32(math.pi / 4), _f32(0)))
        y = self.bind(self._horner(z, _ATAN) * z * r + r + start)
        return self.bind(tirx.Select(x < _f32(0), _f32(0) - y, y))

    def pow(self, x: Expr, y: Expr) -> Expr:
        return power(self.bind, lambda z: self._horner(z, _EXP2), x, y) if _is_f32(x) else self.bind(tirx.power(x, y))

    def sigmoid(self, x: Expr) -> Expr:
        # Next to 1 a denormal is nothing, and slow.
        grown = self.exp_within(self._clamp(_like(x, 0) - x, -87.0, 88.8)) if _is_f32(x) else self.exp(_like(x, 0) - x)
        return self.bind(_like(x, 1) / (_like(x, 1) + grown))

    def tanh(self, x: Expr) -> Expr:
        x = self.bind(x)
        if not _is_f32(x):
            return self._tanh_f64(x)
        c = self._clamp(x, -7.90531110763549805, 7.90531110763549805)
        z = self.bind(c * c)
        y = self._clamp(c * self._horner(z, _TANH_UP) / self._horner(z, _TANH_DOWN), -1.0, 1.0)
        return self.bind(tirx.Select(tirx.abs(x) < _f32(0.0004), x, y))

    def _tanh_f64(self, x: Expr) -> Expr:
        """Return 1 - 2 / (e^2|x| + 1) with the sign of x; below 0.1 a series, which avoids the cancellation."""
        a = self.bind(tirx.abs(x))
        far = self.bind(_like(x, 1) - _like(x, 2) / (self.exp(a + a) + _like(x, 1)))
        z = self.bind(x * x)
        near = _like(x, 0)
        for c in _TANH_SERIES:
            near = (near + _like(x, c)) * z
        near = self.bind(x + x * near)
        return self.bind(tirx.Select(a < _like(x, 0.1), near, tirx.Select(x < _like(x, 0), _like(x, 0) - far, far)))

    def erf(self, x: Expr) -> Expr:
        if not _is_f32(x):
            return self.bind(tirx.erf(x))
        c = self._clamp(x, -4.0, 4.0)
        z = self.bind(c * c)
        return self._clamp(c * self._horner(z, _ERF_UP) / self._horner(z, _ERF_DOWN), -1.0, 1.0)

    def gelu(self, x: Expr, approximate: str) -> Expr:
        x = self.bind(x)
        if approximate == "tanh":
            inner = self.bind(_like(x, 2 * _GELU) * (x + _like(x, 0.044715) * x * x * x))
            return x * self.sigmoid(inner)
        return _like(x, 0.5) * x * (_like(x, 1) + self.erf(x * _like(x, math.sqrt(0.5))))

    def gelu_slope(self, x: Expr, approximate: str) -> Expr:
        """Return the derivative of gelu."""
        x = self.bind(x)
        if approximate == "tanh":
            s = self.sigmoid(self.bind(_like(x, 2 * _GELU) * (x + _like(x, 0.044715) * x * x * x)))
            return s + x * s * (_like(x, 1) - s) * _like(x, 2 * _GELU) * (_like(x, 1) + _like(x, 3 * 0.044715) * x * x)
        phi = _like(x, 0.5) * (_like(x, 1) + self.erf(x * _like(x, math.sqrt(0.5))))
        return phi + x * self.exp_down(_like(x, -0.5) * x * x) * _like(x, 1 / math.sqrt(2 * math.pi))

    def larger(self, a: Expr, b: Expr) -> Expr:
        """Return the larger operand, nan if either is."""
        a, b = self.bind(a), self.bind(b)
        if dtype_name(a).startswith("float"):
            return self.bind(tirx.Select(tirx.Or(a > b, tirx.isnan(a)), a, b))
        return self.bind(tirx.Select(a > b, a, b))

    def peak(self, a: Expr, b: Expr) -> Expr:
        """Return the larger operand; nan in the second one is left out."""
        return self.bind(tirx.Select(b > a, b, a))

    def smaller(self, a: Expr, b: Expr) -> Expr:
        a, b = self.bind(a), self.bind(b)
        if dtype_name(a).startswith("float"):
            return self.bind(tirx.Select(tirx.Or(a < b, tirx.isnan(a)), a, b))
        return self.bind(tirx.Select(a < b, a, b))
