"""Find the layers of a model that change gear (GEARBX 6.1)."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from ..errors import GearbxError
from ..formats import DEFAULT_FORMAT, get_format
from ..formats.base import Format, Reconstructed
from ..formats.exact import ExactLinear, ExactMultiLinear, ExactSwitchLinear
from ..formats.native import NativeDense, NativeEmbedding, NativeMultiLinear, NativeSwitchLinear
from ..formats.planes import PlanesLinear, PlanesMultiLinear, PlanesSwitchLinear
from .activations import STORED, dtype_name
from .adapters import layers_of, places_of
from .ladder import DENSE as SIXTEEN
from .output_head import multiplies_by_method, tied_head
from .own_products import own_matrices, readers
from .parts import misfit
from .sharding import sharding_of
from .towers import in_tower

# As in `nn.quantize`: no, yes, or yes with {"bits": the fewest bits of this layer in any gear}, and perhaps {"clamp":
# the largest magnitude of a weight in a quantized gear}.
Predicate = Callable[[str, nn.Module], bool | dict]

# Parts of a path, in lower case and without underscores. The second line: linear attention, that of T5 and of other
# decoders that read an encoder's output, and OLMo's projections, which stand beside those of its MLP.
ATTENTION = {"selfattn", "attention", "attn", "selfattention"}
ATTENTION |= {"linearattn", "linearattention", "crossattn", "crossattention", "encdecattention", "attproj", "attnout"}
DENSE = (nn.Linear, NativeDense, SwitchLinear, NativeSwitchLinear, MultiLinear, NativeMultiLinear)
TABLES = (nn.Embedding, NativeEmbedding)
QUANTIZED = (
    nn.QuantizedLinear,
    QuantizedSwitchLinear,
    QuantizedMultiLinear,
    nn.QuantizedAllToShardedLinear,
    nn.QuantizedShardedToAllLinear,
    nn.QuantizedEmbedding,
    PlanesLinear,
    PlanesSwitchLinear,
    PlanesMultiLinear,
    ExactLinear,
    ExactSwitchLinear,
    ExactMultiLinear,
    Reconstructed,
)


FOR_BFLOAT16 = "is for bfloat16"
TOWER = "reads images or sound, and is selected by manage 'everything'"


@dataclass(frozen=True)
class Layer:
    """A managed layer.

    module: as loaded. lowest_bits: the fewest bits that it has in any gear. clamp: the largest magnitude of its weights
    in a quantized gear, if there is one. is_table: an embedding whose rows are looked up, and that is no output head.
    """

    path: str
    module: nn.Module
    lowest_bits: int = 0
    clamp: float | None = None
    is_table: bool = False

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


def stored_widths(layer: Layer, format: Format, gears: Iterable[int], others: Iterable[int] = ()) -> tuple[int, ...]:
    """`widths_of` a layer in a format. Where a format has certain ladders alone, other layers have 16 bits alone."""
    gears = {*gears, *others}
    if layer.is_table:
        gears = {min(gears), max(gears)}
    widths = widths_of(layer, gears, format.layer_bits)
    return (SIXTEEN,) if format.ladders and widths not in format.ladders else widths


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


MANAGE: dict[str, Predicate] = {
    "all": lambda path, module: not in_tower(path),
    "attention": lambda path, module: is_attention(path, module) and not in_tower(path),
    "mlp": lambda path, module: is_mlp(path, module) and not in_tower(path),
    "everything": lambda path, module: True,  # towers for images and sound too
}


def get_predicate(manage: str | Predicate) -> Predicate:
    """The predicate of this name, or `manage` itself. Raises GearbxError for a name that does not exist."""
    if callable(manage):
        return manage
    if manage not in MANAGE:
        raise GearbxError(f"manage '{manage}' does not exist; choose from {', '.join(MANAGE)}, or give a predicate")
    return MANAGE[manage]


def own_predicate(model: nn.Module) -> Predicate:
    """What the model's class says of its layers, as in `mlx_lm.convert`; yes where it says nothing."""
    return getattr(model, "quant_predicate", None) or (lambda path, module: True)


def natural_order(path: str) -> list[tuple[int, str]]:
    """Sort key: layers.2 before layers.10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"\.", path)]


def is_quantized(model: nn.Module) -> bool:
    """Whether any module of the model is already quantized."""
    return any(isinstance(m, QUANTIZED) for m in model.modules())


def discover(
    model: nn.Module,
    manage: str | Predicate = "all",
    group_size: int = 64,
    format: str | Format = DEFAULT_FORMAT,
) -> tuple[list[Layer], dict[str, str]]:
    """Divide all linear layers, with a tied output head, into managed ones and others.

    The others include matrices that a class of the model multiplies by itself, such as routers.

    A layer is managed if the predicate takes it, the model class does not object (with its `quant_predicate`, which may
    also ask for more bits, as for the routers of some mixtures of experts), and the format can store its input width.

    Returns:
        the managed layers in the order of the model, and path to reason of the other linear layers.
    """
    predicate, own = get_predicate(manage), own_predicate(model)
    managed, unmanaged = list[Layer](), dict[str, str]()
    head, read_by, known = tied_head(model), readers(model), get_format(format)
    stored, places = getattr(model, STORED, {}), places_of(model)
    parts = sharding.parts if (sharding := sharding_of(model)) else {}
    for path, module in sorted(layers_of(model).items(), key=lambda item: natural_order(item[0])):
        if isinstance(module, TABLES) and path != head:
            continue
        if type(module) not in DENSE and path != head:
            # An unknown class may compute something else, which a stock quantized layer would not.
            unmanaged |= {} if isinstance(module, QUANTIZED) else own_matrices(path, module)
            continue
        if path == head and type(module) not in TABLES:
            unmanaged[path] = f"output heads of class {type(module).__name__} are not known"
            continue
        choice, objection = predicate(path, module), own(path, module)
        unfit = misfit(parts.get(path), known, group_size) or known.fits(module.weight.shape[-1], group_size)
        if not choice:
            unmanaged[path] = TOWER if in_tower(path) else "not selected by manage"
        elif objection is False:
            unmanaged[path] = "kept dense by the model class"
        elif not multiplies_by_method(model, path) if path == head else path in read_by:
            unmanaged[path] = f"class {read_by.get(path, type(model).__name__)} reads its weight itself"
        elif unfit:
            unmanaged[path] = unfit
        elif not mx.issubdtype(module.weight.dtype, mx.floating):
            unmanaged[path] = f"weights of type {module.weight.dtype}"
        elif stored.get(f"{places.get(path, path)}.weight", module.weight.dtype) not in known.types:
            unmanaged[path] = f"weights of {dtype_name(module.weight.dtype)}, and format {known.name} {FOR_BFLOAT16}"
        else:
            floors = [answer.get("bits", 0) for answer in (choice, objection) if isinstance(answer, dict)]
            clamp = choice.get("clamp") if isinstance(choice, dict) else None
            managed.append(Layer(path, module, max(floors, default=0), clamp))
    return managed, unmanaged


def none_managed(unmanaged: Mapping[str, str]) -> GearbxError:
    """The error of a model without managed layers. unmanaged: path to reason, as from `discover`."""
    reasons = "; ".join(sorted(set(unmanaged.values()))) or "it has no linear layer"
    remedy = (
        "; choose format planes or affine, or make the model bfloat16 (mlx_lm.convert --dtype bfloat16, which rounds)"
    )
    return GearbxError(f"no layer can change gear: {reasons}{remedy if FOR_BFLOAT16 in reasons else ''}")
