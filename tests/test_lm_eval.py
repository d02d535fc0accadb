"""The model `gearbx` of lm-eval: scores and texts come from the gearbox, token by token."""

import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("lm_eval", reason="the extra lm-eval is not installed")

import lm_eval
from datasets import Dataset
from lm_eval.api.registry import get_model
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks import TaskManager
from mlx_lm.evaluate import MLXLM

from gearbx_mlx import GearbxError
from gearbx_mlx.lm_eval import main
from gearbx_mlx.lm_eval.run import GearbxLM
from gearbx_mlx.loading import DEMO_MODEL

pytestmark = pytest.mark.processes

QUESTION = "Question: Tom has 5 apples and buys 7 more. How many does he have?\nAnswer:"
PAIRS = [(QUESTION, " Tom has 5"), (QUESTION, " He"), ("Once upon a time", " there was a king")]


NOTHING_ELSE = TaskManager(include_defaults=False)  # its own thousands of files are not read


def asked(*arguments: object) -> SimpleNamespace:
    return SimpleNamespace(args=arguments)


def scores(model) -> list[float]:
    return [score for score, _ in model.loglikelihood([asked(*pair) for pair in PAIRS])]


@pytest.fixture(scope="module")
def plain() -> MLXLM:
    return MLXLM(str(DEMO_MODEL))


def test_it_is_registered_beside_those_of_lm_eval():
    assert get_model("gearbx") is GearbxLM
    assert get_model("dummy") is not None


@pytest.mark.parametrize("mode", ["static", "lossless"])
def test_the_top_gear_scores_and_writes_as_mlx_lm(plain, mode):
    model = GearbxLM(gears="4:16", mode=mode, kernels="mlx")
    expected = plain.loglikelihood([asked(*pair) for pair in PAIRS])
    found = model.loglikelihood([asked(*pair) for pair in PAIRS])
    assert [score for score, _ in found] == pytest.approx([score for score, _ in expected], abs=0.15)  # bfloat16 there
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    text = [asked("Once upon a time there was a king who had three sons.")]
    assert model.loglikelihood_rolling(text) == pytest.approx(plain.loglikelihood_rolling(text), abs=0.5)
    until = {"until": ["\n", "."], "max_gen_toks": 20}
    written = model.generate_until([asked(QUESTION, until)])[0]
    assert written
    assert "." not in written


def test_a_policy_has_the_scores_of_its_gears_where_it_is_in_them():
    low = scores(GearbxLM(gears="2:16", mode="static", gear=2))
    top = scores(GearbxLM(gears="2:16", mode="static"))
    assert scores(GearbxLM(gears="2:16", mode="kickdown", thresholds="0.000001")) == pytest.approx(top, abs=1e-3)
    # The prompt is read in the top gear; what comes after it never is.
    kept = scores(GearbxLM(gears="2:16", mode="kickdown", thresholds="11.9"))
    assert max(abs(a - b) for a, b in zip(kept, top)) > 0.05
    assert max(abs(a - b) for a, b in zip(kept, low)) > 0.05
    assert scores(GearbxLM(gears="2:16", mode="route", thresholds="11.9")) == pytest.approx(low, abs=1e-3)

    # A route shifts after four tokens at the earliest; the shift acts two tokens later.
    def rolling(**further) -> float:
        text = "Once upon a time there was a king who had three sons."
        return GearbxLM(gears="2:16", **further).loglikelihood_rolling([asked(text)])[0]

    mixed = rolling(mode="route", thresholds="0.000001")
    for gear in ("low", "high"):
        assert abs(mixed - rolling(mode="static", gear=gear)) > 0.1


def test_lm_eval_runs_a_task_with_it():
    rows = [{"question": f"{a} + 1 =", "answer": f" {a + 1}"} for a in range(3)]

    class Sums(ConfigurableTask):
        VERSION = 0

        def __init__(self):
            super().__init__(
                config={
                    "task": "sums",
                    "custom_dataset": lambda **kwargs: {"test": Dataset.from_list(rows)},
                    "test_split": "test",
                    "output_type": "multiple_choice",
                    "doc_to_text": "{{question}}",
                    "doc_to_choice": [" 1", " 2", " 3", " blue"],
                    "doc_to_target": "{{answer}}",
                }
            )

    model = GearbxLM(gears="4:16", kernels="auto")
    results = lm_eval.simple_evaluate(model=model, tasks=[Sums()], bootstrap_iters=0, task_manager=NOTHING_ELSE)
    assert results["results"]["sums"]["acc,none"] in (0, 1 / 3, 2 / 3, 1)
    assert len(results["samples"]["sums"]) == 3


def test_mistakes():
    with pytest.raises(ValueError, match="mode 'fast' does not exist"):
        GearbxLM(mode="fast")
    with pytest.raises(ValueError, match="3 gears need 2 thresholds"):
        GearbxLM(thresholds="1.0")
    with pytest.raises(GearbxError, match=r"--model_args thresholds=1:x, bits such as 1.8:3.5 or a file: 1,x: cannot"):
        GearbxLM(thresholds="1:x")
    for argument, value in (("group_size", "wide"), ("max_tokens", -1), ("max_tokens", float("nan"))):
        with pytest.raises(GearbxError, match=f"--model_args {argument}={value}: give a whole number"):
            GearbxLM(**{argument: value})
    for argument in ("format", "kernels", "manage", "path"):
        with pytest.raises(GearbxError, match="inf"):
            GearbxLM(**{argument: float("inf")})
    with pytest.raises(GearbxError, match="--model_args speed: there is no such argument; choose from path, gears"):
        GearbxLM(speed=3)


@pytest.mark.parametrize("kind", [ValueError, FileNotFoundError])
def test_what_lm_eval_itself_refuses_is_one_line(monkeypatch, capsys, kind):
    def refuse():
        raise kind("Tasks not found:\n nosuch")

    monkeypatch.setattr("gearbx_mlx.lm_eval.run.cli_evaluate", refuse)
    with pytest.raises(SystemExit, match="2"):
        main()
    assert capsys.readouterr().err == "error: lm-eval: Tasks not found: nosuch\n"


def test_the_command_runs_a_task(tmp_path):
    rows = [
        {"question": "Once upon a time", "choices": [" there was a king", " zq xj qqq"], "label": 0},
        {"question": "Tom has 5 apples and buys 7 more. How many", "choices": [" qj xv", " apples"], "label": 1},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "tales.yaml").write_text(
        "task: gearbx_tales\ndataset_path: json\noutput_type: multiple_choice\ntest_split: test\n"
        f"dataset_kwargs: {{data_files: {{test: {tmp_path / 'rows.jsonl'}}}}}\n"
        "doc_to_text: '{{question}}'\n"
        "doc_to_choice: '{{choices}}'\ndoc_to_target: label\nmetric_list: [{metric: acc}]\n"
    )
    flags = ["--model", "gearbx", "--model_args", "gears=4:8:16,mode=kickdown,thresholds=1.0:2.0"]
    flags += ["--tasks", "gearbx_tales", "--include_path", str(tmp_path)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "gearbx_mlx.lm_eval", *flags]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    assert re.search(r"\|gearbx_tales\|.*\|acc +\|.*\| +1\|", done.stdout), done.stdout
