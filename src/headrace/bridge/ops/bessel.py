"""Bessel functions of orders 0 and 1 and the Airy function, which jax.scipy.special does not have.

The rational and Chebyshev approximations of Cephes (Stephen L. Moshier), good to double precision.
PyTorch uses the same ones without the leading 1 of some denominators: its J, Y and Ai are off by up
to 3e-6 where two approximations meet. PyTorch has no gradients for these operators.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import jax.scipy.special as special
import torch
from jax import Array

from headrace.bridge.ops.registry import INT_TO_FLOAT, aliases

aten: Any = torch.ops.aten

_Table = Mapping[str, Sequence[float]]

# fmt: off
_ORDER0: _Table = {
    "pp": (
        0.0007969367292973471, 0.08283523921074408, 1.239533716464143,
        5.447250030587687, 8.74716500199817, 5.303240382353949,
        1.0,
    ),
    "pq": (
        0.0009244088105588637, 0.08562884743544745, 1.2535274390105895,
        5.470977403304171, 8.761908832370695, 5.306052882353947,
        1.0,
    ),
    "qp": (
        -0.011366383889846916, -1.2825271867050931, -19.553954425773597,
        -93.20601521237683, -177.68116798048806, -147.07750515495118,
        -51.41053267665993, -6.050143506007285,
    ),
    "qq": (
        1.0, 64.3178256118178, 856.4300259769806,
        3882.4018360540163, 7240.467741956525, 5930.727011873169,
        2062.0933166032783, 242.0057402402914,
    ),
    "rp": (
        -4794432209.782018, 1956174919465.5657, -249248344360967.72,
        9708622510473064.0,
    ),
    "rq": (
        1.0, 499.563147152651, 173785.4016763747,
        48440965.83399621, 11185553704.535683, 2112775201154.892,
        310518229857422.56, 3.1812195594320496e+16, 1.7108629408104315e+18,
    ),
    "yp": (
        15592.436785523574, -14663929.59039716, 5435264770.518765,
        -982136065717.9115, 87590639439536.7, -3466283033847297.0,
        4.4273326857256984e+16, -1.8495080043698668e+16,
    ),
    "yq": (
        1.0, 1041.2835366425984, 626107.330137135,
        268919633.39381415, 86400248710.3935, 20297961275010.555,
        3171577528429750.5, 2.5059625617265306e+17,
    ),
}
_ORDER1: _Table = {
    "pp": (
        0.0007621256162081731, 0.07313970569409176, 1.1271960812968493,
        5.112079511468076, 8.424045901417724, 5.214515986823615,
        1.0,
    ),
    "pq": (
        0.0005713231280725487, 0.06884559087544954, 1.105142326340617,
        5.073863861286015, 8.399855543276042, 5.209828486823619,
        1.0,
    ),
    "qp": (
        0.05108625947501766, 4.982138729512334, 75.82382841325453,
        366.7796093601508, 710.8563049989261, 597.4896124006136,
        211.68875710057213, 25.207020585802372,
    ),
    "qq": (
        1.0, 74.23732770356752, 1056.4488603826283,
        4986.410583376536, 9562.318924047562, 7997.041604473507,
        2826.1927851763908, 336.0936078106983,
    ),
    "rp": (
        -899971225.7055594, 452228297998.19403, -72749424522181.83,
        3682957328638529.0,
    ),
    "rq": (
        1.0, 620.8364781180543, 256987.25675774884,
        83514679.14319493, 22151159547.97925, 4749141220799.914,
        784369607876235.9, 8.952223361846274e+16, 5.322786203326801e+18,
    ),
    "yp": (
        1263204747.9017804, -647355876379.1603, 114509511541823.73,
        -8127702555013251.0, 2.024394757135949e+17, -7.788771962659501e+17,
    ),
    "yq": (
        1.0, 594.3015923461282, 235564.09294306856,
        73481194.44597217, 18760131610.870617, 3882312774962.3857,
        620557727146953.8, 6.871410873553005e+16, 3.9727060811656064e+18,
    ),
}
_K0: _Table = {
    "near": (
        1.374465435613523e-16, 4.25981614279661e-14, 1.0349695257633842e-11,
        1.904516377220209e-09, 2.5347910790261494e-07, 2.286212103119452e-05,
        0.001264615411446926, 0.0359799365153615, 0.3442898999246285,
        -0.5353273932339028,
    ),
    "far": (
        5.300433772686263e-18, -1.6475804301524212e-17, 5.2103915050390274e-17,
        -1.678231096805412e-16, 5.512055978524319e-16, -1.848593377343779e-15,
        6.3400764774050706e-15, -2.2275133269916698e-14, 8.032890775363575e-14,
        -2.9800969231727303e-13, 1.140340588208475e-12, -4.514597883373944e-12,
        1.8559491149547177e-11, -7.957489244477107e-11, 3.577397281400301e-10,
        -1.69753450938906e-09, 8.574034017414225e-09, -4.660489897687948e-08,
        2.766813639445015e-07, -1.8317555227191195e-06, 1.39498137188765e-05,
        -0.00012849549581627802, 0.0015698838857300533, -0.0314481013119645,
        2.4403030820659555,
    ),
}
_K1: _Table = {
    "near": (
        -7.023863479386288e-18, -2.427449850519366e-15, -6.666901694199329e-13,
        -1.4114883926335278e-10, -2.213387630734726e-08, -2.4334061415659684e-06,
        -0.0001730288957513052, -0.006975723859639864, -0.12261118082265715,
        -0.3531559607765449, 1.5253002273389478,
    ),
    "far": (
        -5.756744483665017e-18, 1.7940508731475592e-17, -5.689462558442859e-17,
        1.838093544366639e-16, -6.057047248373319e-16, 2.038703165624334e-15,
        -7.019837090418314e-15, 2.4771544244813043e-14, -8.976705182324994e-14,
        3.3484196660784293e-13, -1.2891739609510289e-12, 5.13963967348173e-12,
        -2.1299678384275683e-11, 9.218315187605006e-11, -4.1903547593418965e-10,
        2.015049755197033e-09, -1.0345762465678097e-08, 5.7410841254500495e-08,
        -3.5019606030878126e-07, 2.406484947837217e-06, -1.936197974166083e-05,
        0.00019521551847135162, -0.002857816859622779, 0.10392373657681724,
        2.7206261904844427,
    ),
}
_AIRY: _Table = {
    "an": (
        0.346538101525629, 12.007595273964581, 76.27960536152345,
        168.08922493463058, 159.75639135016442, 70.53609068404442,
        14.026469116338967, 1.0,
    ),
    "ad": (
        0.5675945326387702, 14.75625625848472, 84.51389701414746,
        177.31808814540045, 164.2346928715297, 71.47784008255756,
        14.095913560783403, 1.0,
    ),
    "afn": (
        -0.1316963234183318, -0.6264565444319123, -0.6931580360369335,
        -0.2797799815451191, -0.04919001326095003, -0.004062659235948854,
        -0.0001592764962392621, -2.776491081552329e-06, -1.6778769848911465e-08,
    ),
    "afd": (
        1.0, 13.356042070655324, 32.682503279522464,
        26.736704094149957, 9.187074029072596, 1.4752914677166642,
        0.11568717379518804, 0.004402916416152112, 7.547203482874142e-05,
        4.5185009297058035e-07,
    ),
    "agn": (
        0.01973399320916857, 0.39110302961568827, 1.0657989759959559,
        0.9391692298166502, 0.35146565610554764, 0.06338889196289255,
        0.005858041130483885, 0.000282851600836737, 6.98793669997261e-06,
        8.117892395543892e-08, 3.415517847659236e-10,
    ),
    "agd": (
        1.0, 9.30892908077442, 19.835292871831214,
        15.564662893286462, 5.476860694229755, 0.9542936116189619,
        0.08645808263523921, 0.004126565238242226, 0.00010125908511650914,
        1.1716673321441352e-06, 4.9183457006293e-09,
    ),
}
# fmt: on


def _ratio(table: _Table, above: str, below: str, x: Array) -> Array:
    """Quotient of two polynomials, highest coefficient first."""
    top, bottom = (jnp.asarray(table[name], x.dtype) for name in (above, below))
    return jnp.polyval(top, x) / jnp.polyval(bottom, x)


def _waves(table: _Table, x: Array, phase: float) -> tuple[Array, Array]:
    """J and Y for x > 5, from the asymptotic form."""
    inverse = 5 / x
    p = _ratio(table, "pp", "pq", inverse * inverse)
    q = inverse * _ratio(table, "qp", "qq", inverse * inverse)
    cos, sin = jnp.cos(x - phase), jnp.sin(x - phase)
    scale = math.sqrt(2 / math.pi) / jnp.sqrt(x)
    return (p * cos - q * sin) * scale, (p * sin + q * cos) * scale


def _bessel_j0(x: Array) -> Array:
    x = jnp.abs(x)
    far = x > 5
    square = jnp.square(jnp.where(far, 0, x))
    zeros = (square - 5.78318596294678452118) * (square - 30.4712623436620863991)
    near = zeros * _ratio(_ORDER0, "rp", "rq", square)
    near = jnp.where(x < 1e-5, 1 - square / 4, near)
    return jnp.where(far, _waves(_ORDER0, jnp.where(far, x, 9), math.pi / 4)[0], near) + 0 * x


def _bessel_j1(x: Array) -> Array:
    size = jnp.abs(x)
    far = size > 5
    small = jnp.where(far, 0, size)
    square = small * small
    zeros = (square - 14.6819706421238932572) * (square - 49.2184563216946036703)
    near = _ratio(_ORDER1, "rp", "rq", square) * small * zeros
    value = jnp.where(far, _waves(_ORDER1, jnp.where(far, size, 9), 3 * math.pi / 4)[0], near)
    return jnp.where(x < 0, -value, value) + 0 * x


def _bessel_y0(x: Array) -> Array:
    far = x > 5
    small = jnp.where(far | (x <= 0), 1, x)
    near = _ratio(_ORDER0, "yp", "yq", small * small)
    near = near + 2 / math.pi * jnp.log(small) * _bessel_j0(small)
    value = jnp.where(far, _waves(_ORDER0, jnp.where(far, x, 9), math.pi / 4)[1], near)
    return jnp.where(x == 0, -jnp.inf, jnp.where(x > 0, value, jnp.nan))


def _bessel_y1(x: Array) -> Array:
    far = x > 5
    small = jnp.where(far | (x <= 0), 1, x)
    near = small * _ratio(_ORDER1, "yp", "yq", small * small)
    near = near + 2 / math.pi * (_bessel_j1(small) * jnp.log(small) - 1 / small)
    value = jnp.where(far, _waves(_ORDER1, jnp.where(far, x, 9), 3 * math.pi / 4)[1], near)
    return jnp.where(x == 0, -jnp.inf, jnp.where(x > 0, value, jnp.nan))


def _chebyshev(coefficients: Sequence[float], x: Array) -> Array:
    """Chebyshev series at x / 2 by Clenshaw's recurrence; the constant term comes last."""
    a = jnp.full_like(x, coefficients[0])
    p = q = jnp.zeros_like(x)
    for coefficient in coefficients[1:]:
        p, q = q, a
        a = x * q - p + coefficient
    return (a - p) / 2


def _scaled_k(table: _Table, x: Array, order: int) -> tuple[Array, Array]:
    """K for x <= 2, and exp(x) K for x > 2; each holds on its own side."""
    small, large = jnp.where((x > 0) & (x <= 2), x, 1), jnp.where(x > 2, x, 3)
    near = _chebyshev(table["near"], small * small - 2)
    logarithm = jnp.log(small / 2)
    if order == 0:
        near = near - logarithm * special.i0(small)
    else:
        near = near / small + logarithm * special.i1(small)
    return near, _chebyshev(table["far"], 8 / large - 2) / jnp.sqrt(large)


def _outside(x: Array, value: Array) -> Array:
    return jnp.where(x == 0, jnp.inf, jnp.where(x > 0, value, jnp.nan))


def _modified_bessel_k0(x: Array) -> Array:
    near, far = _scaled_k(_K0, x, 0)
    return _outside(x, jnp.where(x <= 2, near, jnp.exp(-x) * far))


def _modified_bessel_k1(x: Array) -> Array:
    near, far = _scaled_k(_K1, x, 1)
    return _outside(x, jnp.where(x <= 2, near, jnp.exp(-x) * far))


def _scaled_modified_bessel_k0(x: Array) -> Array:
    near, far = _scaled_k(_K0, x, 0)
    return _outside(x, jnp.where(x <= 2, near * jnp.exp(x), far))


def _scaled_modified_bessel_k1(x: Array) -> Array:
    near, far = _scaled_k(_K1, x, 1)
    return _outside(x, jnp.where(x <= 2, near * jnp.exp(x), far))


def _airy_ai(x: Array) -> Array:
    edge = 2.09
    value = jnp.where(x < -edge, _airy_waves(jnp.minimum(x, -edge)), _airy_series(x, edge))
    value = jnp.where(x >= edge, _airy_tail(jnp.maximum(x, edge)), value)
    return jnp.where(jnp.isfinite(x), jnp.where(x > 103.892, 0, value), jnp.nan)


def _airy_waves(x: Array) -> Array:
    angle = -2 * x * jnp.sqrt(-x) / 3
    z = 1 / angle
    f = 1 + z * z * _ratio(_AIRY, "afn", "afd", z * z)
    g = z * _ratio(_AIRY, "agn", "agd", z * z)
    t = angle + math.pi / 4
    return (jnp.sin(t) * f - jnp.cos(t) * g) / (math.sqrt(math.pi) * jnp.sqrt(jnp.sqrt(-x)))


def _airy_tail(x: Array) -> Array:
    zeta = 2 * x * jnp.sqrt(x) / 3
    ratio = _ratio(_AIRY, "an", "ad", 1 / zeta)
    return ratio / (2 * math.sqrt(math.pi) * jnp.sqrt(jnp.sqrt(x)) * jnp.exp(zeta))


def _airy_series(x: Array, edge: float) -> Array:
    """The power series; twenty terms are exact to double precision for |x| <= 2.09."""
    x = jnp.clip(x, -edge, edge)
    cube = x * x * x
    m, n = jnp.ones_like(x), x
    f, g = m, n
    for k in range(1, 61, 3):
        m = m * cube / ((k + 1) * (k + 2))
        n = n * cube / ((k + 2) * (k + 3))
        f, g = f + m, g + n
    return 0.355028053887817239260 * f - 0.258819403792806798405 * g


aliases(
    {
        aten.special_bessel_j0.default: _bessel_j0,
        aten.special_bessel_j1.default: _bessel_j1,
        aten.special_bessel_y0.default: _bessel_y0,
        aten.special_bessel_y1.default: _bessel_y1,
        aten.special_modified_bessel_k0.default: _modified_bessel_k0,
        aten.special_modified_bessel_k1.default: _modified_bessel_k1,
        aten.special_scaled_modified_bessel_k0.default: _scaled_modified_bessel_k0,
        aten.special_scaled_modified_bessel_k1.default: _scaled_modified_bessel_k1,
        aten.special_airy_ai.default: _airy_ai,
    },
    promotion=INT_TO_FLOAT,
)
