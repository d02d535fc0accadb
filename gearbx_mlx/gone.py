"""What is gone, and what to use instead. Who meets an unknown flag, field or file looks here before he calls it so."""

SINCE = "0.1.0"

ONE_GEAR_INSTEAD = "use one gear of more bits, such as --gear 8, which is faster for the same loss"
DRAFTS_LEARN = "leave it out: mode lossless learns when to draft, and --draft-length N drafts always as many tokens"
NO_SCHEDULE = "use --gear: one gear was as good"
THRESHOLDS = "leave it out: calibrate finds thresholds of --mode route and kickdown"
ROUTER = (
    "server --server URL --server-model A,B chooses a model by the prompt, and a proxy such as LiteLLM does the rest"
)
GATE = "a file for --thresholds has it: calibrate --window, --hysteresis and --min-gear-duration write one"
STUDIES = "run python -m research policies in a clone of the repository"
ANSWERS = "run python -m research final-answers in a clone of the repository"

GONE: dict[str, str] = {
    "--tolerance": ONE_GEAR_INSTEAD,
    "--curve": DRAFTS_LEARN,
    "--cost": DRAFTS_LEARN,
    "--schedule": NO_SCHEDULE,
    "calibrate --mode lossless": DRAFTS_LEARN,
    "calibrate --top": DRAFTS_LEARN,
    "--target-agreement": ONE_GEAR_INSTEAD,
    "--target-regret": ONE_GEAR_INSTEAD,
    "--target-kl": ONE_GEAR_INSTEAD,
    "--target-bytes": ONE_GEAR_INSTEAD,
    "--schedule-gears": NO_SCHEDULE,
    "calibrate --prompt-tokens": NO_SCHEDULE,
    "calibrate --data": THRESHOLDS,
    "calibrate --tokens": THRESHOLDS,
    "calibrate --context": THRESHOLDS,
    "--telemetry-only": "use --mode telemetry-only",
    "--machine": "set GEARBX_MACHINE=FILE in the environment",
    "--dequant-cache": "use --kernels dequant-cache",
    "--cap-bits": "leave it out: layers are capped to the bits that their format has",
    "--min-cos-strict": "use convert --auto-bits STRICT,LAZY",
    "--min-cos-lazy": "use convert --auto-bits STRICT,LAZY",
    "--outlier-sigma": "use --format codebook:sigma=3",
    "--outlier-cap": "use --format codebook:cap=0.02",
    "--lloyd-rounds": "use --format codebook:rounds=20",
    "--library-size": "use --format codebook-library:library=32",
    "--library-group": "use --format codebook-library:group=128",
    "--window": GATE,
    "--hysteresis": GATE,
    "--min-gear-duration": GATE,
    "--initial-gear": "use --gear, beside --thresholds, --mode route or --small-model",
    "--lookup-tokens": "leave it out: --draft-length N looks nothing up, and programs have Lossless(lookup_tokens=N)",
    "--kv-gear": "use --kv-gears with this gear alone, such as --kv-gears 4",
    "--calibrate-base": "use --base TEXT, or --base alone for the text that ships",
    "--low-model": "use --base MODEL",
    "--manage": "use convert --manage: a checkpoint keeps it",
    "--q-group-size": "use convert --q-group-size: a checkpoint keeps it",
    "--activations": "name them with the kernels, such as --kernels auto:int8",
    "--auto-bits": "use convert --auto-bits: a checkpoint keeps the bits of its layers",
    "--watch-machine": "use --target-tps 0, and GEARBX_MACHINE=FILE in the environment for a state that a file plays",
    "--max-memory": "use --residency disk:3GB",
    "--color": "set FORCE_COLOR=1 or NO_COLOR=1 in the environment",
    "--describe": "use --verbose all",
    "--pipeline": "set GEARBX_PIPELINE=1 in the environment of all ranks",
    "schema 'gearbx-mlx drafting'": DRAFTS_LEARN,
    "schema 'gearbx-mlx schedule'": NO_SCHEDULE,
    "a file for mode 'static'": "use --gear",
    "--small-server": ROUTER,
    "--large-server": ROUTER,
    "--small-server-model": ROUTER,
    "--large-server-model": ROUTER,
    "--connect-timeout": "--server-timeout is for the connection too",
    "--no-fallback": ROUTER,
    "--path": "--model_args of lm_eval are the flags of generate; give model",
    "--group-size": "use convert --q-group-size: a checkpoint keeps it",
    "--use-chat-template": "--model_args of lm_eval are the flags of generate; give ignore_chat_template",
    "--server-api": "Ollama is asked by its API like OpenAI's; leave the flag out",
    "format exact with gears 3,16": "make gears 4,16 of the original",
    "format exact with gears 4,8,16": "make gears 4,16 of the original, or give --format planes",
    "--residency host": "it freed next to nothing; use --residency disk, or stream",
    "--policy": STUDIES,
    "--share": STUDIES,
    "--between": STUDIES,
    "--reference-dtype": STUDIES,
    "evaluate --seed": STUDIES,
    "evaluate --prompt-tokens": STUDIES,
    "evaluate --prompt-gear": STUDIES,
    "--task": ANSWERS,
    "--num-problems": ANSWERS,
    "--num-shots": ANSWERS,
    "evaluate --system-prompt": ANSWERS,
    "evaluate --max-tokens": ANSWERS,
    "evaluate -m": ANSWERS,
    "evaluate --small-model": "run python -m research pair-sweep in a clone of the repository",
    "--answers-only": "run python -m research pair-sweep in a clone of the repository",
    "benchmark metal": "use benchmark mac --own-kernels",
    "benchmark kernels": "run python -m research kernels in a clone of the repository",
    "benchmark token": "run python -m research token in a clone of the repository",
    "benchmark server": "run python -m research server in a clone of the repository",
}
"""From a name to what to use instead: `--flag`, `--flag value`, `command --flag` where other commands still have the
flag, a field of a request, a mode, `schema 'NAME'` of a file, `format NAME with gears GEARS`."""


def gone(name: str, command: str = "") -> str | None:
    """Return the line that refuses a name; None for one that is not gone."""
    instead = GONE.get(f"{command} {name}") or GONE.get(name)
    return None if instead is None else f"{name} is gone since gearbx-mlx {SINCE}; {instead}"
