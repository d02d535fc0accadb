"""Where the figures in docs/ come from: studies that run in a clone of the repository, and are not installed.

`python -m research` lists them. A study is a function with the decorator `study`; README.md says how to add one.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODULES = (
    *("figures", "attention", "errors", "exact", "calibrated_base", "codebook", "precision", "kv"),
    *("lossless", "shapes", "decoding_costs", "disk", "products", "processes", "llama_cpp", "pictures"),
    *("evidence", "fidelity", "energy", "kernels", "token", "server", "policies", "policy_regret"),
    *("agreement", "answers", "pair", "starts", "prompt_lookup", "real_models", "mac", "metal_texts", "draft_head"),
)
sys.path.append(str(ROOT / "scripts"))  # pages, which the tools of the project use too
