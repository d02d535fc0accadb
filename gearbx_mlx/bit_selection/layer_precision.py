"""From measured layers to the layers of a precision manifest."""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, TypedDict

import mlx.core as mx
import numpy as np
from msgspec import Meta

from ..evaluation.journal import Journal
from ..evaluation.metrics import spearman
from ..gears.discovery import Layer
from ..gears.ladder import DENSE
from .codebook_selection import kind_of
from .least_bits import ACCURACY_THRESHOLD, least_bits
from .precision import LayerPrecision
from .sensitivity import Cost, Distance, ExactSensitivity

GAUSSIAN = 3.2905  # sigmas: the 99.9th percentile of |w| of a Gaussian
CLAMP = 3.0  # sigmas: where the weights of a flagged layer are clipped
CLAMPED = " clamped"  # behind a layer's path: its part with a clamp
SAMPLED = 2**20  # weights of a layer that its quantile is taken from


class MeasuredLayer(TypedDict):
    """A part of the journal: one layer that was reduced alone.

    distances: width to the KL (nats) and the change of perplexity (percent). cost: as `Cost.counts`.
    """

    distances: Annotated[dict[Annotated[str, Meta(pattern="^[234568]$")], tuple[float, float]], Meta(min_length=1)]
    cost: Annotated[list[float], Meta(min_length=6, max_length=6)]


def outliers(weight: mx.array) -> tuple[float, float]:
    """The 99.9th percentile of |w| in sigmas, and sigma.

    The percentile of a Gaussian is 3.29 sigma. A layer with a larger one has heavier tails, and is flagged.
    """
    flat = weight.reshape(-1)
    values = np.abs(np.array(flat[:: max(1, flat.size // SAMPLED)].astype(mx.float32)))
    sigma = float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))
    return (float(np.quantile(values, 0.999)) / sigma if sigma else 0.0), sigma


def flagged(layers: Sequence[Layer]) -> dict[str, float]:
    """The clamp to try for each layer whose tails are heavier than a Gaussian's, by path."""
    found = {layer.path: outliers(layer.module.weight) for layer in layers}
    return {path: CLAMP * sigma for path, (ratio, sigma) in found.items() if ratio > GAUSSIAN}


def measure_layers(
    exact: ExactSensitivity, bits: Sequence[int], journal: Journal, progress: Callable[[], None] = lambda: None
) -> None:
    """Measure every layer at every width that it can have; each layer goes into the journal."""
    exact.continue_after(journal.parts)
    for layer in exact.in_order():
        if layer.path not in journal.parts:
            exact.cost = Cost()  # from zero: sums of parts round alike in runs that were stopped anywhere
            widths = [width for width in bits if width in exact.gearbox.widths_of(layer)]
            found = {width: exact.measure(layer, width) for width in widths}
            journal.add(layer.path, measured_layer(found, exact.cost))
        progress()


def measure_clamped(clamped: ExactSensitivity, journal: Journal, progress: Callable[[], None] = lambda: None) -> None:
    """Measure the layers that have a clamp, from the lowest width up, for as long as the clamp lowers the KL.

    A clamp has to pay at every width, because one stack of planes serves all widths.

    Args:
        clamped: of a gearbox whose flagged layers have their clamps.
    """
    for layer in clamped.in_order():
        if layer.clamp is None:
            continue
        part = clamp_part(layer.path)
        if part not in journal.parts:
            clamped.cost = Cost()
            found: dict[int, Distance] = {}
            for width, (kl, _) in journal.parts[layer.path]["distances"].items():
                found[int(width)] = clamped.measure(layer, int(width))
                if found[int(width)].kl >= kl:
                    break
            journal.add(part, measured_layer(found, clamped.cost))
        progress()


def measured_layer(found: Mapping[int, Distance], cost: Cost) -> MeasuredLayer:
    """The part of a layer. cost: of this layer."""
    return {
        "distances": {str(width): (there.kl, there.perplexity_change) for width, there in found.items()},
        "cost": [*cost.counts()],
    }


def clamp_part(path: str) -> str:
    return f"{path}{CLAMPED}"


def measuring_cost(parts: Mapping[str, MeasuredLayer]) -> Cost:
    """What `measure_layers` computed for all layers of a journal, over all runs that wrote to it."""
    costs = [part["cost"] for name, part in parts.items() if not name.endswith(CLAMPED)]
    return Cost(*map(sum, zip(*costs)))


def layer_precisions(
    layers: Sequence[Layer],
    parts: Mapping[str, MeasuredLayer],
    clamps: Mapping[str, float],
    threshold: float = ACCURACY_THRESHOLD,
) -> dict[str, LayerPrecision]:
    """What the manifest says of every layer.

    Args:
        layers: with their dense modules.
        parts: of the journal.
        clamps: path to the clamp that was tried.
        threshold: percent that a layer at its fewest bits may add to the perplexity.
    """
    made = {}
    for layer in layers:
        plain = parts[layer.path]["distances"]
        tried = parts.get(clamp_part(layer.path))
        cut = {} if tried is None else tried["distances"]
        pays = bool(cut) and all(width in cut and cut[width][0] < kl for width, (kl, _) in plain.items())
        chosen = cut if pays else plain
        kl = {int(width): values[0] for width, values in chosen.items()}
        change = {int(width): values[1] for width, values in chosen.items()}
        made[layer.path] = LayerPrecision(
            kind=kind_of(layer.path, layer.module),
            weights=layer.module.weight.size,
            min_bits=max(least_bits(kl, change, threshold), layer.lowest_bits),
            max_bits=DENSE,
            kl=kl,
            perplexity_change=change,
            outliers=outliers(layer.module.weight)[0],
            clamp=clamps[layer.path] if pays else None,
            kl_clamped={int(width): values[0] for width, values in cut.items()},
        )
    return made


def estimated_precisions(layers: Sequence[Layer], kls: Mapping[str, Mapping[int, float]]) -> dict[str, LayerPrecision]:
    """As `layer_precisions`, from estimates of the KL alone. kls: path to bits to nats."""
    return {
        layer.path: LayerPrecision(
            kind=kind_of(layer.path, layer.module),
            weights=layer.module.weight.size,
            min_bits=max(least_bits(kls[layer.path], {}), layer.lowest_bits),
            max_bits=DENSE,
            kl=kls[layer.path],
        )
        for layer in layers
    }


def rank_agreement(exact: Mapping[str, LayerPrecision], proxies: Mapping[str, Mapping[int, float]]) -> dict[int, float]:
    """Spearman's correlation between the measured and the estimated KL of the layers, at each width."""
    widths = sorted({bits for layer in exact.values() for bits in layer.kl})
    found = {}
    for bits in widths:
        both = [path for path, layer in exact.items() if bits in layer.kl and bits in proxies.get(path, {})]
        if len(both) > 1:
            a, b = ([kl[bits] for kl in column] for column in ([exact[p].kl for p in both], [proxies[p] for p in both]))
            found[bits] = spearman(np.array(a), np.array(b))
    return found
