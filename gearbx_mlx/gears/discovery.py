"""Which layers of a model change gear (GEARBX 6.1)."""

import re
from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from ..errors import GearbxError
from ..formats import DEFAULT_FORMAT, FORMATS
from ..formats.base import Format
from ..formats.native import NativeDense, NativeSwitchLinear
from ..formats.planes import PlanesLinear, PlanesSwitchLinear
from ..formats.reconstruct import Reconstructed

# As in `nn.quantize`: no, yes, or yes with {"bits": lowest gear that this layer is used in}.
Predicate = Callable[[str, nn.Module], bool | dict]

ATTENTION = {"selfattn", "attention", "attn", "selfattention"}
DENSE = (nn.Linear, NativeDense, SwitchLinear, NativeSwitchLinear)
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
    """A managed layer: where it is, its module as loaded, and the bits below which it does not go."""

    path: str
    module: nn.Module
    lowest_bits: int = 0


def is_attention(path: str, module: nn.Module) -> bool:
    """Whether a component of the path names an attention block: the layers that GEARBX itself manages."""
    return any(part.lower().replace("_", "") in ATTENTION for part in path.split("."))


def is_mlp(path: str, module: nn.Module) -> bool:
    """Whether the layer is inside a block and outside its attention."""
    return any(part.isdigit() for part in path.split(".")) and not is_attention(path, module)


MANAGE: dict[str, Predicate] = {"all": lambda path, module: True, "attention": is_attention, "mlp": is_mlp}


def get_predicate(manage: str | Predicate) -> Predicate:
    """Raises GearbxError for a name that does not exist."""
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


def discover(
    model: nn.Module,
    manage: str | Predicate = "all",
    group_size: int = 64,
    format: Format = FORMATS[DEFAULT_FORMAT],
) -> tuple[list[Layer], dict[str, str]]:
    """Sort all linear layers into those that are managed and those that are not.

    A layer is managed if the predicate takes it, the model class does not object (`quant_predicate`, which may also
    ask for more bits, as for the routers of some mixtures of experts), and the format can store its input width.

    Returns:
        managed layers in the order of the model, and path to reason for the linear layers that stay as they are.
    """
    wanted = get_predicate(manage)
    own: Predicate = getattr(model, "quant_predicate", None) or (lambda path, module: True)
    managed, unmanaged = [], {}
    for path, module in sorted(model.named_modules(), key=lambda item: natural_order(item[0])):
        if type(module) not in DENSE:
            # A class of its own computes something of its own, which a stock quantized layer would not.
            kind = type(module).__name__
            if "Linear" in kind and not isinstance(module, QUANTIZED) and "weight" in module:
                unmanaged[path] = f"layers of class {kind} are not known"
            continue
        choice, objection = wanted(path, module), own(path, module)
        misfit = format.fits(module.weight.shape[-1], group_size)
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
            managed.append(Layer(path, module, max(floors, default=0)))
    return managed, unmanaged
