"""Find the layers of a model that change gear (GEARBX 6.1)."""

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from ..errors import GearbxError
from ..formats import DEFAULT_FORMAT, get_format
from ..formats.base import Format
from ..formats.native import NativeDense, NativeEmbedding, NativeSwitchLinear
from ..formats.planes import PlanesLinear, PlanesSwitchLinear
from ..formats.reconstruct import Reconstructed
from .adapters import layers_of
from .cost import separate_head
from .ladder import DENSE as SIXTEEN

# As in `nn.quantize`: no, yes, or yes with {"bits": the fewest bits of this layer in any gear}, and perhaps {"clamp":
# the largest magnitude of a weight in a quantized gear}.
Predicate = Callable[[str, nn.Module], bool | dict]

ATTENTION = {"selfattn", "attention", "attn", "selfattention"}
DENSE = (nn.Linear, NativeDense, SwitchLinear, NativeSwitchLinear)
TABLES = (nn.Embedding, NativeEmbedding)
QUANTIZED = (
    nn.QuantizedLinear,
    QuantizedSwitchLinear,
    nn.QuantizedEmbedding,
    PlanesLinear,
    PlanesSwitchLinear,
    Reconstructed,
)


@dataclass(frozen=True)
class Layer:
    """A managed layer.

    module: as loaded. lowest_bits: the fewest bits that it has in any gear. clamp: the largest magnitude of its weights
    in a quantized gear, if there is one.
    """

    path: str
    module: nn.Module
    lowest_bits: int = 0
    clamp: float | None = None

    def cut(self, weight: mx.array) -> mx.array:
        """The weight to quantize, clamped where the layer has a clamp."""
        return weight if self.clamp is None else mx.clip(weight, -self.clamp, self.clamp)


def widths_of(layer: Layer, gears: Iterable[int], others: Iterable[int] = ()) -> tuple[int, ...]:
    """The bits, ascending, that a layer has in gears of these bits: none below its floor.

    Instead of bits below its floor it has the fewest of `gears` or `others` that reach the floor, or else 16.
    """
    gears = set(gears)
    available = sorted({*gears, *others})
    floors = (max(bits, layer.lowest_bits) for bits in gears)
    return tuple(sorted({next((bits for bits in available if bits >= floor), SIXTEEN) for floor in floors}))


def at_least(widths: Sequence[int], bits: int) -> int:
    """The lowest width of `bits` or more; 16 where there is none."""
    return next((width for width in widths if width >= bits), SIXTEEN)


def at_most(widths: Sequence[int], bits: int) -> int:
    """The highest width of `bits` or fewer; the lowest width where there is none."""
    return next((width for width in reversed(widths) if width <= bits), widths[0])


def with_bits(bits: Mapping[str, int]) -> Predicate:
    """A predicate that manages the layers of these paths, each with its bits as a floor."""
    return lambda path, module: {"bits": bits[path]} if path in bits else False


def with_clamps(manage: str | Predicate, clamps: Mapping[str, float]) -> Predicate:
    """The predicate `manage`, with clamps: path to the largest magnitude of a layer's weights in a quantized gear."""
    predicate = get_predicate(manage)

    def choose(path: str, module: nn.Module) -> bool | dict:
        choice = predicate(path, module)
        if not choice or path not in clamps:
            return choice
        return {**(choice if isinstance(choice, dict) else {}), "clamp": clamps[path]}

    return choose


def is_attention(path: str, module: nn.Module) -> bool:
    """Whether a part of the path names an attention block. GEARBX manages only these layers."""
    return any(part.lower().replace("_", "") in ATTENTION for part in path.split("."))


def is_mlp(path: str, module: nn.Module) -> bool:
    """Whether the layer is in a block, but not in its attention."""
    return any(part.isdigit() for part in path.split(".")) and not is_attention(path, module)


MANAGE: dict[str, Predicate] = {"all": lambda path, module: True, "attention": is_attention, "mlp": is_mlp}


def get_predicate(manage: str | Predicate) -> Predicate:
    """The predicate of this name, or `manage` itself. Raises GearbxError for a name that does not exist."""
    if callable(manage):
        return manage
    if manage not in MANAGE:
        raise GearbxError(f"manage '{manage}' does not exist; choose from {', '.join(MANAGE)}, or give a predicate")
    return MANAGE[manage]


def natural_order(path: str) -> list[tuple[int, str]]:
    """Sort key: layers.2 before layers.10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"\.", path)]


def is_quantized(model: nn.Module) -> bool:
    """Whether any module of the model is already quantized."""
    return any(isinstance(m, QUANTIZED) for m in model.modules())


def vocabulary(model: nn.Module) -> int:
    """V, the length of the logits: the rows of the largest embedding."""
    embeddings = [m for m in model.modules() if isinstance(m, nn.Embedding | nn.QuantizedEmbedding)]
    if not embeddings:
        raise GearbxError(f"{type(model).__name__} has no token embedding, so its vocabulary is unknown")
    return max(m.weight.shape[0] for m in embeddings)


def tied_head(model: nn.Module, tables: Sequence[type] = TABLES) -> str | None:
    """The path of the token embedding that is also the output head, or None where the head is a layer of its own.

    Args:
        tables: the classes of embeddings that count.
    """
    rows = vocabulary(model) if any(isinstance(m, tuple(tables)) for m in model.modules()) else 0
    modules = layers_of(model)
    largest = [path for path, m in modules.items() if type(m) in tables and len(m.weight) == rows]
    separate = separate_head(modules)
    # A few of mlx-lm's classes multiply by the embedding's weight themselves, which no module can replace.
    uses_it = any(calls_as_linear(kind) for kind in {type(module) for module in model.modules()})
    return largest[0] if len(largest) == 1 and uses_it and not separate else None


def calls_as_linear(kind: type) -> bool:
    """Whether a class of modules multiplies by an embedding through its method."""
    functions = (value for value in vars(kind).values() if inspect.isfunction(value))
    return any("as_linear" in function.__code__.co_names for function in functions)


def discover(
    model: nn.Module,
    manage: str | Predicate = "all",
    group_size: int = 64,
    format: str | Format = DEFAULT_FORMAT,
) -> tuple[list[Layer], dict[str, str]]:
    """Divide all linear layers, with a tied output head, into managed ones and others.

    A layer is managed if the predicate takes it, the model class does not object (with its `quant_predicate`, which may
    also ask for more bits, as for the routers of some mixtures of experts), and the format can store its input width.

    Returns:
        the managed layers in the order of the model, and path to reason of the other linear layers.
    """
    predicate = get_predicate(manage)
    own: Predicate = getattr(model, "quant_predicate", None) or (lambda path, module: True)
    managed, unmanaged = [], {}
    head = tied_head(model)
    for path, module in sorted(layers_of(model).items(), key=lambda item: natural_order(item[0])):
        if type(module) not in DENSE and path != head:
            # An unknown class may compute something else, which a stock quantized layer would not.
            kind = type(module).__name__
            if "Linear" in kind and not isinstance(module, QUANTIZED) and "weight" in module:
                unmanaged[path] = f"layers of class {kind} are not known"
            continue
        choice, objection = predicate(path, module), own(path, module)
        misfit = get_format(format).fits(module.weight.shape[-1], group_size)
        if not choice:
            unmanaged[path] = "not selected by manage"
        elif objection is False:
            unmanaged[path] = "kept dense by the model class"
        elif misfit:
            unmanaged[path] = misfit
        elif not mx.issubdtype(module.weight.dtype, mx.floating):
            unmanaged[path] = f"weights of type {module.weight.dtype}"
        else:
            floors = [answer.get("bits", 0) for answer in (choice, objection) if isinstance(answer, dict)]
            clamp = choice.get("clamp") if isinstance(choice, dict) else None
            managed.append(Layer(path, module, max(floors, default=0), clamp))
    return managed, unmanaged
