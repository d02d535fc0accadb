"""Discovery of the layers that change gear (GEARBX 6.1) and of the output head; order in which layers are lowered.

The model's own code shows if an embedding table is a tied output head, and how long the logits are: it runs on one
token without computing anything. MLX computes only shapes until values are needed.

The default order, without measurements, follows the Manifest document ("Architecture", "Lessons").
"""

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from ..compat.arrays import dtype_name
from ..compat.classes import modules_of, readers
from ..errors import GearbxError, check_choice
from ..formats import DEFAULT_FORMAT, LIKE_MLX, get_format
from ..formats.base import Format, Reconstructed, whole_groups
from ..formats.exact import ExactLinear, ExactMultiLinear, ExactSwitchLinear
from ..formats.native import NativeDense, NativeEmbedding, NativeMultiLinear, NativeSwitchLinear
from ..formats.planes import PlanesModule
from ..formats.tied import TiedEmbedding, linear_with
from .activations import STORED
from .adapters import adapters_of, layers_of, own_arrays, places_of
from .ladder import DENSE
from .sharding import divided_parts, part_misfit

# As in `nn.quantize`: no, yes, or yes with {"bits": the fewest bits of this layer in any gear}.
Predicate = Callable[[str, nn.Module], bool | dict]
# Parts of a path, in lower case and without underscores. The second line has linear attention, attention of T5 and of
# other decoders to an encoder's output, and OLMo's projections, siblings of its MLP's.
ATTENTION = {"selfattn", "attention", "attn", "selfattention"}
ATTENTION |= {"linearattn", "linearattention", "crossattn", "crossattention", "encdecattention", "attproj", "attnout"}
DENSE_LAYERS = (nn.Linear, NativeDense, SwitchLinear, NativeSwitchLinear, MultiLinear, NativeMultiLinear)
TABLES = (nn.Embedding, NativeEmbedding)
QUANTIZED = (
    nn.QuantizedLinear,
    QuantizedSwitchLinear,
    QuantizedMultiLinear,
    nn.QuantizedAllToShardedLinear,
    nn.QuantizedShardedToAllLinear,
    nn.QuantizedEmbedding,
    PlanesModule,
    ExactLinear,
    ExactSwitchLinear,
    ExactMultiLinear,
    Reconstructed,
)
FOR_BFLOAT16 = "is for bfloat16"
OF_TOWER = "reads images or sound, and is selected by manage 'everything'"
TOWER = re.compile(r"vision|visual|image|audio|speech|multi_?modal|mm_projector|aligner")


@dataclass(frozen=True)
class Layer:
    """A managed layer.

    module: as loaded. lowest_bits: the fewest bits that it has in any gear. is_table: True for an embedding that is
    not an output head.
    """

    path: str
    module: nn.Module
    lowest_bits: int = 0
    is_table: bool = False


def discover(
    model: nn.Module, manage: str | Predicate = "all", group_size: int = 64, format: str | Format = DEFAULT_FORMAT
) -> tuple[list[Layer], dict[str, str]]:
    """Divide all linear layers, with a tied output head, into managed ones and others.

    The others include matrices that a class of the model multiplies by itself, such as routers. A layer is managed if
    the predicate and the model class's `quant_predicate` accept it, and the format can store its input width. The
    class may also require more bits, as for the routers of some mixtures of experts.

    Returns the managed layers in the order of the model, and path to reason of the other linear layers.
    """
    predicate, own = get_predicate(manage), own_predicate(model)
    managed, unmanaged = list[Layer](), dict[str, str]()
    head, read_by, known = tied_head(model), readers(model), get_format(format)
    stored, places = getattr(model, STORED, {}), places_of(model)
    parts = divided_parts(model)
    for path, module in sorted(layers_of(model).items(), key=lambda item: natural_order(item[0])):
        if isinstance(module, TABLES) and path != head:
            continue
        if type(module) not in DENSE_LAYERS and path != head:
            # An unknown class may compute something that a stock quantized layer would not.
            unmanaged |= {} if isinstance(module, QUANTIZED) else own_matrices(path, module)
            continue
        if path == head and type(module) not in TABLES:
            unmanaged[path] = f"output heads of class {type(module).__name__} are not known"
            continue
        choice, objection = predicate(path, module), own(path, module)
        unfit = part_misfit(parts.get(path), known, group_size) or known.fits(module.weight.shape[-1], group_size)
        if not choice:
            unmanaged[path] = OF_TOWER if in_tower(path) else "not selected by manage"
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
            managed.append(Layer(path, module, max(floors, default=0)))
    return managed, unmanaged


def own_matrices(path: str, module: nn.Module) -> dict[str, str]:
    """Return path to reason of a module's matrices that no gear changes: its weight, or all others except biases."""
    kind = type(module).__name__
    names = [name for name, value in module.items() if name[0] != "_" and "bias" not in name and is_matrix(value)]
    if "weight" in names:
        return {path: "a convolution" if "Conv" in kind else f"layers of class {kind} are not known"}
    return {f"{path}.{name}".lstrip("."): f"a matrix that class {kind} multiplies by itself" for name in names}


def is_matrix(value: object) -> bool:
    """Return True for an array with more than one row, and more than one column."""
    return isinstance(value, mx.array) and sum(length > 1 for length in value.shape) > 1


def none_managed(unmanaged: Mapping[str, str]) -> GearbxError:
    """Return the error of a model without managed layers. unmanaged: path to reason, as from `discover`."""
    reasons = "; ".join(sorted(set(unmanaged.values()))) or "it has no linear layer"
    remedy = (
        "; choose format planes or affine, or make the model bfloat16 (mlx_lm.convert --dtype bfloat16, which rounds)"
    )
    return GearbxError(f"no layer can change gear: {reasons}{remedy if FOR_BFLOAT16 in reasons else ''}")


def is_quantized(model: nn.Module) -> bool:
    """Return True if any module of the model is already quantized."""
    return any(isinstance(m, QUANTIZED) for m in model.modules())


def natural_order(path: str) -> list[tuple[int, str]]:
    """Return a sort key that puts layers.2 before layers.10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"\.", path)]


def own_predicate(model: nn.Module) -> Predicate:
    """Return the predicate of the model's class, as in `mlx_lm.convert`; by default it accepts all layers."""
    return getattr(model, "quant_predicate", None) or (lambda path, module: True)


def get_predicate(manage: str | Predicate) -> Predicate:
    """Return the predicate of this name, or `manage` itself. Raises GearbxError for an unknown name."""
    if callable(manage):
        return manage
    check_choice("manage", manage, PREDICATES)
    return PREDICATES[manage]


PREDICATES: dict[str, Predicate] = {
    "all": lambda path, module: not in_tower(path),
    "attention": lambda path, module: is_attention(path, module) and not in_tower(path),
    "mlp": lambda path, module: is_mlp(path, module) and not in_tower(path),
    "everything": lambda path, module: True,  # towers for images and sound too
}


def with_bits(bits: Mapping[str, int]) -> Predicate:
    """Return a predicate that manages the layers of these paths, each with its bits as a floor."""
    return lambda path, module: {"bits": bits[path]} if path in bits else False


def is_attention(path: str, module: nn.Module) -> bool:
    """Return True if a part of the path names an attention block. GEARBX manages only these layers."""
    return any(part.lower().replace("_", "") in ATTENTION for part in path.split("."))


def is_mlp(path: str, module: nn.Module) -> bool:
    """Return True for a layer in a block that is not in its attention."""
    return any(part.isdigit() for part in path.split(".")) and not is_attention(path, module)


def in_tower(path: str) -> bool:
    """Return True for modules that read images or sound, by the names of mlx-lm and mlx-vlm."""
    return TOWER.search(path.lower()) is not None


def stored_widths(layer: Layer, format: Format, gears: Iterable[int]) -> tuple[int, ...]:
    """Return the ascending bits at which a format stores a layer for these gears.

    Bits below the layer's floor become the fewest bits of gears or format that reach it, or else 16. If the format has
    only certain ladders, other layers have only 16 bits.
    """
    gears = {*gears}
    if layer.is_table:
        gears = {min(gears), max(gears)}
    available = sorted({*gears, *format.layer_bits})
    widths = tuple(sorted({at_least(available, max(bits, layer.lowest_bits)) for bits in gears}))
    return (DENSE,) if format.ladders and widths not in format.ladders else widths


def at_least(widths: Sequence[int], bits: int) -> int:
    """Return the lowest width of `bits` or more; 16 if there is none."""
    return next((width for width in widths if width >= bits), DENSE)


def at_most(widths: Sequence[int], bits: int) -> int:
    """Return the highest width of `bits` or fewer; the lowest width if there is none."""
    return next((width for width in reversed(widths) if width <= bits), widths[0])


def tables_to_pack(
    model: nn.Module, manage: str | Predicate, widths: Iterable[int], format: Format, group_size: int
) -> list[Layer]:
    """Return the embeddings that `mlx_lm.convert` would quantize and that are not output heads.

    The list is empty if the base is the original: a format that mlx-lm does not have, and a ladder with a 16-bit gear.
    """
    lowest, *_ = sorted(widths)
    if lowest == DENSE or (DENSE in widths and format.name not in LIKE_MLX):
        return []
    predicate, own, head, found = get_predicate(manage), own_predicate(model), tied_head(model), []
    for path, module in layers_of(model).items():
        if type(module) not in TABLES or path == head or not predicate(path, module):
            continue
        floor = own(path, module)
        width, dtype = module.weight.shape[-1], module.weight.dtype
        fits = not whole_groups(width, group_size) and mx.issubdtype(dtype, mx.floating)
        fits = fits and (not format.ladders or dtype in format.types)
        bits = floor.get("bits", 0) if isinstance(floor, dict) else 0
        if floor is not False and fits and bits < DENSE:
            found.append(Layer(path, module, bits, is_table=True))
    return found


only_shapes: ContextVar[bool] = ContextVar("only_shapes", default=False)
"""Flag while a model runs only for the shapes of its outputs: layers that need values skip them."""
ONE_TOKEN = mx.zeros((1, 1), mx.int32)


def vocabulary(model: nn.Module) -> int:
    """Return V, the length of the logits. Raises GearbxError if a model has no logits."""
    try:
        return logits_length(model)
    except Exception as error:  # a class that reads values while it runs, or that is not a language model
        rows = [length_after_token(model, partial(row_and_product, table)) for table in tables(model).values()]
        if not rows:
            raise GearbxError(f"{type(model).__name__} has no token embedding; use a language model") from error
        return max(rows)


def tied_head(model: nn.Module) -> str | None:
    """Return the path of the embedding table that is also the output head; None if the head is a separate layer.

    The number of logits then follows the table's rows: a table of one row gives one logit.
    """
    adapters = adapters_of(model)
    for path, table in tables(model).items():
        if isinstance(table, TiedEmbedding):
            return path
        with unchanged(model):
            rows, adapter = len(table.weight), adapters.get(path)
            cut_to_one_row(table, table, rows)
            if adapter is not None:
                cut_to_one_row(adapter, own_arrays(adapter), rows)
            try:
                if logits_length(model) == 1:
                    return path
            except Exception:
                continue  # as in `vocabulary`
    return None


def cut_to_one_row(module: dict[str, Any], arrays: Mapping[str, Any], rows: int) -> None:
    """Cut those arrays of a module to one row that have `rows`: also the scales of a packed table, and LoRA factors."""
    for name, array in list(arrays.items()):
        if isinstance(array, mx.array) and len(array) == rows:
            module[name] = array[:1]


def multiplies_by_method(model: nn.Module, head: str) -> bool:
    """Return True if a model calls `as_linear` of its tied head, so that a `TiedEmbedding` can replace it.

    A few of mlx-lm's classes multiply by the embedding's weight directly, so no module can replace it.
    """
    table = layers_of(model)[head]
    row = mx.zeros((1, table.weight.shape[-1]), table.weight.dtype)
    with unchanged(model):
        tied = TiedEmbedding(table.weight, linear_with(row))
        nn.Module.update_modules(model, tree_unflatten([(head, tied)]))  # without adapters
        return logits_length(model) == 1


def tables(model: nn.Module) -> dict[str, nn.Module]:
    """Return path to module of all tables of rows: MLX's embeddings, packed or not, and equivalent classes."""
    return {path: module for path, module in layers_of(model).items() if is_table(module)}


def is_table(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding | nn.QuantizedEmbedding) or hasattr(module, "as_linear")


def logits_length(model: nn.Module) -> int:
    """Return the length of the logits after one token. Raises any error of a model that cannot run without values."""
    return length_after_token(model, lambda token: model(token, cache=make_prompt_cache(model)))


def row_and_product(table: nn.Module, token: mx.array) -> mx.array:
    """Return the products of a token's row with all rows of its table, as an output head computes."""
    return table.as_linear(table(token))


def length_after_token(model: nn.Module, run: Callable[[mx.array], mx.array]) -> int:
    """Return the last length of a part's output for one token, without computing the output."""
    lengths: list[int] = []

    def trace(token: mx.array) -> mx.array:
        lengths.append(run(token).shape[-1])
        return token  # so that MLX has no operation of the model to compile

    # While it compiles a function, MLX refuses to compute: no weight of a large model is read by mistake.
    with unchanged(model):
        before = only_shapes.set(True)
        try:
            mx.compile(trace)(ONE_TOKEN)
        finally:
            only_shapes.reset(before)
    return lengths[0]


@contextlib.contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Restore the modules at the end: some keep products of their weights when they first run."""
    before = [(module, dict(module), dict(vars(module))) for module in modules_of(model)]
    try:
        yield
    finally:
        for module, items, attributes in before:
            for now, then in ((module, items), (vars(module), attributes)):
                dict.clear(now)
                dict.update(now, then)  # a module's own `update` takes parameters


def default_sensitivity(modules: Mapping[str, nn.Module]) -> Callable[[str, int], float]:
    """Return the cost of a layer at some bits, as a function of its path and the bits; only the order is meaningful.

    Attention in the middle of the stack is least sensitive, then MLPs there, then the outer quarters of the blocks,
    then the head. Within these classes, blocks near an end of the stack are more sensitive. The squared error
    of a b-bit weight is proportional to 4^-b. So a layer that is one bit more sensitive costs as much as a different
    layer at one bit less.
    """
    count = block_count(modules)
    quarter = max(1, count // 4)  # the first and the last quarter of the blocks are outer ones
    extra = {}  # bits by which a layer is more sensitive than attention in the middle of the stack
    for path, module in modules.items():
        number = block_number(path)
        if number is None:
            extra[path] = 4.0
            continue
        inner = quarter <= number < count - quarter
        kind = 2 if not inner else 0 if is_attention(path, module) else 1
        from_middle = abs(2 * number + 1 - count) / count  # 0 to 1
        extra[path] = kind + from_middle / 2
    return lambda path, bits: 4.0 ** (extra[path] - bits)


def block_count(paths: Iterable[str]) -> int:
    numbers = (block_number(path) for path in paths)
    return max((number + 1 for number in numbers if number is not None), default=1)


def block_number(path: str) -> int | None:
    """Return the number of a layer's block; None outside of the blocks, as for the head."""
    return next((int(part) for part in path.split(".") if part.isdigit()), None)
