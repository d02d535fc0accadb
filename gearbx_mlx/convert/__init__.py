"""Flags of `convert`, and their settings."""

import argparse
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from ..bit_selection import LAZY, STRICT, Floors
from ..cli.flags import LayerSettings, device_flag
from ..cli.parser import command_settings, parser_of
from ..cli.start import call, command
from ..errors import GearbxError, numbers
from ..formats import LIKE_MLX, has_codebooks
from ..gears.ladder import DTYPE_NAMES, EMBEDDINGS, Ladder, default_ladder
from ..settings import Settings, flag, given_names, parse_bytes


def parse_floors(text: str) -> tuple[float, ...]:
    """Parse --auto-bits: at most two numbers. Raises GearbxError for other text."""
    floors = numbers("--auto-bits", text, float, "0.98,0.93") if text else ()
    if len(floors) > 2:
        raise GearbxError(f"--auto-bits: at most two floors, got {text}; use for example 0.98,0.93")
    return floors


@dataclass(frozen=True)
class FloorSettings(Settings):
    """Quality floors from the command line; missing ones have defaults."""

    title: ClassVar[str] = "quality floors (format codebook or codebook-library)"

    auto_bits: tuple[float, ...] | None = flag(
        None,
        "Minimum cosines that set each layer's bits: STRICT, and LAZY for routed experts",
        default_text=f"$XFP_MIN_COS_STRICT or {STRICT}, $XFP_MIN_COS_LAZY or {LAZY}",
        metavar="STRICT,LAZY",
        nargs="?",
        const="",
        parse=parse_floors,
        rare=True,
    )

    @property
    def wanted(self) -> bool:
        return self.auto_bits is not None

    def floors(self, format: str | None) -> Floors | None:
        """Return the requested floors for a format; None if not requested. Raises GearbxError without codebooks."""
        if self.auto_bits is None:
            return None
        floors = Floors.chosen(*self.auto_bits, *[None] * (2 - len(self.auto_bits)))
        if not has_codebooks(format):
            raise GearbxError(f"quality floors choose codebooks, got format {format}; use --format codebook")
        return floors


@dataclass(frozen=True)
class BudgetSettings(Settings):
    """The maximum bytes of the model during encoding, or bits per weight; and prompts for comparison."""

    title: ClassVar[str] = "budget (format codebook or codebook-library; instead of floors)"

    memory_budget: int | None = flag(
        None,
        "Target for the memory of model and generation, such as 3GB",
        metavar="SIZE",
        parse=partial(parse_bytes, shown="--memory-budget"),
    )
    target_bpw: float | None = flag(None, "Target for the mean bits per weight of the managed layers", metavar="BITS")
    reserve: str | None = flag(
        None,
        "Share of the memory budget for KV cache and activations: 2GB or 20%%",
        default_text="measured, for at most 8192 tokens",
        metavar="SIZE",
    )
    prompts: str | None = flag(
        None,
        "File of prompts to compare with the original: one per line, or JSON Lines",
        default_text="bundled ones",
        named=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.target_bpw is not None and not 0 < self.target_bpw < 16:
            raise GearbxError(f"--target-bpw: must be between 0 and 16, got {self.target_bpw:g}; use 4.5 for example")
        if self.prompts is not None and not self.wanted:
            raise GearbxError("--prompts: is for a budget; add --memory-budget or --target-bpw, or omit it")
        self.reserved()

    @property
    def wanted(self) -> bool:
        return self.memory_budget is not None or self.target_bpw is not None

    def reserved(self) -> int | None:
        """Return bytes of the budget for generation; None: to be measured. Raises GearbxError for an invalid share."""
        if self.reserve is None:
            return None
        if self.memory_budget is None:
            raise GearbxError(f"--reserve: needs --memory-budget, got only {self.reserve}; set both, or omit --reserve")
        found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*(%?)\s*", self.reserve)
        if found and found[2]:
            reserved = float(found[1]) / 100 * self.memory_budget
        else:
            reserved = 0.0 if found and float(found[1]) == 0 else parse_bytes(self.reserve, "--reserve")
        if not 0 <= reserved < self.memory_budget:
            raise GearbxError(f"--reserve: must be less than --memory-budget, got {self.reserve}; use 2GB, 20% or 0")
        return round(reserved)


DESCRIPTION = (
    "Write a checkpoint with several gears. mlx-lm reads it as a 4-bit model if the format is planes or affine."
)


@dataclass(frozen=True)
class ConversionSettings(Settings):
    """The model to convert (None: the bundled one), and the output directory.

    dtype: the type to save the original weights in; None: theirs. manifest: a precision manifest, to be stored with the
    gears, or with a table to write for mlx-lm.
    """

    title: ClassVar[str] = "conversion"

    model: str | None = flag(
        None,
        "Local directory or Hub repository",
        default_text="the bundled demo model",
        named=True,
        also=("--hf-path",),
    )
    mlx_path: str = flag("mlx_model", "Directory to write", named=True)
    revision: str | None = flag(None, "Branch, tag or commit of a Hub repository", named=True)
    trust_remote_code: bool = flag(False, "Run code of the model and its tokenizer")
    dtype: str | None = flag(None, "Type of the saved original weights", default_text="theirs", choices=DTYPE_NAMES)
    device: str | None = device_flag()
    calibrate: str | None = flag(
        None,
        "Calibration text for the lowest gear, or JSON Lines as in GSM8K; none: round-to-nearest",
        default_text="the bundled text",
        nargs="?",
        const="",
        metavar="TEXT|none",
    )
    embeddings: str | None = flag(
        None,
        "Embeddings of the lowest gear: quantized as by mlx_lm.convert, or original",
        default_text=EMBEDDINGS[0],
        choices=EMBEDDINGS,
    )
    no_card_kl: bool = flag(False, "Omit the KL of the gears from the original, measured for the model card")
    upload_repo: str | None = flag(None, "Hugging Face repository to upload the model to", named=True)
    manifest: str | None = flag(
        None,
        "Manifest from gearbx_mlx sensitivity or allocate; with one gear, its table becomes a checkpoint for mlx-lm",
        metavar="FILE",
        named=True,
    )
    verify: str | None = flag(
        None,
        "Compare the arrays of a geared checkpoint with their hashes; format exact: also with the original files",
        metavar="DIR",
        named=True,
    )
    restore: str | None = flag(
        None,
        "Write the original files of a geared checkpoint of format exact to --mlx-path, byte for byte",
        metavar="DIR",
        named=True,
    )

    @property
    def asks_text(self) -> bool:
        """Flag for explicit requests of a calibration."""
        return self.calibrate not in (None, "none")


@dataclass(frozen=True)
class ConvertSettings:
    """All settings of `convert`. Raises GearbxError for flags that exclude each other."""

    conversion: ConversionSettings
    layout: LayerSettings
    floors: FloorSettings
    budget: BudgetSettings

    def __post_init__(self) -> None:
        if self.conversion.verify is not None or self.conversion.restore is not None:
            self._check_alone()
        elif self.conversion.manifest is not None:
            self._check_manifest()
        elif self.layout.format == "exact" and self.conversion.dtype is not None:
            raise GearbxError(
                f"--dtype {self.conversion.dtype}: format exact has the weights bit for bit; omit --dtype, "
                "or use mlx_lm.convert --dtype first, which rounds"
            )
        elif self.conversion.asks_text and (self.floors.wanted or self.budget.wanted):
            raise GearbxError("--calibrate chooses codes of 3 and 4 bits; omit it, or omit floors and budget")
        elif not self.ladder.quantized_bits:
            raise GearbxError(f"--gears {self.ladder}: nothing to convert; use a gear of fewer bits")
        elif isinstance(self.quality, BudgetSettings) and self.ladder[0].bits != 2:
            raise GearbxError(
                f"--gears {self.ladder}: a budget finds the bits of a gear that starts at 2; omit --gears"
            )

    def _check_alone(self) -> None:
        conversion, read = self.conversion, {"verify", "restore", "mlx_path", "revision", "device"}
        others = {*given_names(conversion, ConversionSettings()), *given_names(self.layout, LayerSettings())} - read
        if conversion.verify is not None and conversion.restore is not None:
            raise GearbxError("--restore and --verify are two commands; omit --verify, since --restore verifies too")
        if others or self.floors.wanted or self.budget.wanted:
            if conversion.restore is not None:
                raise GearbxError(
                    "--restore writes the converted original; omit all flags except --mlx-path and --revision"
                )
            raise GearbxError("--verify compares a checkpoint and writes none; omit flags for writing")

    def _check_manifest(self) -> None:
        if self.conversion.dtype or self.layout.manage or self.conversion.embeddings:
            raise GearbxError("--manifest has the layers and their weights; omit --dtype, --manage and --embeddings")
        if self.conversion.asks_text:
            raise GearbxError("--manifest was measured with RTN codes; omit --calibrate")
        if self.floors.wanted or self.budget.wanted:
            raise GearbxError("--manifest has the bits of every layer; omit the floors and the budget")

    @property
    def measures(self) -> bool:
        """Flag for measuring the gears' KL from the original."""
        return not self.conversion.no_card_kl

    @property
    def writes_table(self) -> bool:
        """Flag for writing a table of a manifest instead of gears."""
        gears = self.layout.gears
        return self.conversion.manifest is not None and (gears is None or len(gears) == 1)

    @property
    def calibrates(self) -> bool:
        """Flag for calibrating the lowest gear's codes: on request, and by default if they are free."""
        conversion = self.conversion
        others = self.floors.wanted or self.budget.wanted or conversion.manifest is not None
        by_default = conversion.calibrate is None and not others and self.layout.chosen_format in LIKE_MLX
        return conversion.asks_text or by_default

    @property
    def ladder(self) -> Ladder:
        """The gears to write; by default the two of mode lossless."""
        by_quality = self.floors.wanted or self.budget.wanted
        usual = default_ladder(self.layout.chosen_format, by_quality)
        if self.calibrates:
            usual = Ladder([usual[0].bits, usual.top.bits])
        return self.layout.gears or usual

    @property
    def quality(self) -> Floors | BudgetSettings | None:
        """Floors or a budget that determine the bits of every layer; None without. Raises GearbxError for both."""
        format = self.layout.chosen_format
        if not self.budget.wanted:
            return self.floors.floors(format)
        if not has_codebooks(format):
            raise GearbxError(f"a budget needs codebooks, got format {format}; use --format codebook")
        if self.floors.wanted:
            raise GearbxError("a budget finds the floors; omit --auto-bits")
        return self.budget


def setup_arg_parser() -> argparse.ArgumentParser:
    return parser_of(ConvertSettings, "convert", DESCRIPTION)


MLX_LMS = {"quantize", "q_bits", "q_mode", "quant_predicate", "dequantize"}  # keywords of mlx-lm's convert


def convert(hf_path: str | Path | None = None, mlx_path: str | Path = "mlx_model", **keywords: Any) -> Path:
    """Return the directory of a new checkpoint with several gears of a model, as the command `convert` writes it.

    Progress and notes go to stderr.

    Args:
        hf_path: a local directory or a Hub repository, as in `mlx_lm.convert`; None: the demo model.
        mlx_path: the directory to write.
        keywords: the command's other flags by name, with its defaults: gears ("4,16"), format, manage, q_group_size,
            dtype, device, calibrate (a file of text; "": the bundled text; "none"), embeddings, no_card_kl, revision,
            trust_remote_code, upload_repo, manifest, auto_bits, memory_budget, target_bpw, prompts; restore, a
            checkpoint of format exact whose original is written instead.

    Raises:
        GearbxError: an unknown keyword, arguments that exclude each other, a model that cannot be converted,
            or a directory that exists or cannot be written.
    """
    for name in MLX_LMS & keywords.keys():
        raise GearbxError(
            f"{name} is a keyword of mlx_lm.convert; omit it, and set gears (mlx-lm reads the lowest one), "
            'as in gears="4,8,16", q_group_size and format'
        )
    settings = command_settings(ConvertSettings, {"model": hf_path, "mlx_path": mlx_path, **keywords})
    if settings.conversion.verify is not None:
        raise GearbxError("verify is only for the command; omit it")
    return call("convert", "uploaded_checkpoint", settings)


main = command("convert")
