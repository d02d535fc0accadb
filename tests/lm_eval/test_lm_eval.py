"""The model `gearbx` of lm-eval: scores and texts come from the gearbox, token by token."""

import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("lm_eval", reason="THE MODEL OF LM-EVAL WAS NOT CHECKED: pip install '.[lm-eval]'")

from lm_eval.api.registry import get_model
from mlx_lm.evaluate import MLXLM

from gearbx_mlx import GearbxError
from gearbx_mlx.lm_eval.run import GearbxLM
from gearbx_mlx.loading import DEMO_MODEL

pytestmark = pytest.mark.processes

QUESTION = "Question: Tom has 5 apples and buys 7 more. How many does he have?\nAnswer:"
PAIRS = [(QUESTION, " Tom has 5"), (QUESTION, " He"), ("Once upon a time", " there was a king"), ("", "Once")]
KING = "Once upon a time there was a king who had three sons."


def asked(*arguments: object) -> SimpleNamespace:
    return SimpleNamespace(args=arguments)


def scores(model) -> list[float]:
    return [score for score, _ in model.loglikelihood([asked(*pair) for pair in PAIRS])]


def test_model_is_registered_beside_lm_eval_models():
    assert get_model("gearbx") is GearbxLM
    assert get_model("dummy") is not None


@pytest.mark.parametrize("mode", ["static", "lossless"])
def test_top_gear_scores_and_generates_like_mlx_lm(mode):
    plain, model = MLXLM(str(DEMO_MODEL)), GearbxLM(gears="4:16", mode=mode, kernels="mlx")
    expected = plain.loglikelihood([asked(*pair) for pair in PAIRS[:3]])
    found = model.loglikelihood([asked(*pair) for pair in PAIRS])
    assert [score for score, _ in found[:3]] == pytest.approx([score for score, _ in expected], abs=0.15)  # bfloat16
    assert [greedy for _, greedy in found[:3]] == [greedy for _, greedy in expected]
    assert found[3][0] < 0  # after nothing
    text = [asked(KING)]
    assert model.loglikelihood_rolling(text) == pytest.approx(plain.loglikelihood_rolling(text), abs=0.5)
    until = {"until": ["\n", "."], "max_gen_toks": 20}
    written = model.generate_until([asked(QUESTION, until)])[0]
    assert written
    assert "." not in written


def test_mode_scores_equal_its_gears_scores():
    low = scores(GearbxLM(gears="2:16", mode="static", gear=2))
    top = scores(GearbxLM(gears="2:16", mode="static"))
    assert scores(GearbxLM(gears="2:16", mode="kickdown", thresholds=1e-06)) == pytest.approx(top, abs=1e-3)
    assert scores(GearbxLM(gears="2:16", mode="kickdown", thresholds=11.9)) == pytest.approx(low, abs=1e-3)
    assert max(abs(a - b) for a, b in zip(low, top)) > 0.05

    # A route shifts after four tokens at the earliest; the shift acts two tokens later.
    def rolling(**further) -> float:
        return GearbxLM(gears="2:16", **further).loglikelihood_rolling([asked(KING)])[0]

    mixed = rolling(mode="route", thresholds=0.000001)
    for gear in ("low", "high"):
        assert abs(mixed - rolling(mode="static", gear=gear)) > 0.1


def test_mistakes(capsys):
    with pytest.raises(GearbxError, match="3 gears need 2 thresholds"):
        GearbxLM(gears="4:8:16", thresholds=1.0, mode="route")
    for name, value in {"temp": 1, "target_tps": 9, "kv_bits": 4}.items():
        with pytest.raises(GearbxError, match=f"--model_args {name}: no meaning for lm-eval; omit it"):
            GearbxLM(**{name: value})
    with pytest.raises(GearbxError, match="small_model: lm-eval has one model"):
        GearbxLM(small_model="demo")
    wrong = {"speed": "--speed=x: not a flag", "mode": "--mode: unknown, got x; choose from route"}
    for name, words in wrong.items():
        with pytest.raises(SystemExit, match="2"):
            GearbxLM(**{name: "x"})
        assert words in capsys.readouterr().err


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
