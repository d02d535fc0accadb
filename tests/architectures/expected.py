"""What fails today, by kind of test, with a short reason. Whoever mends one deletes its line: a strict test says so."""

STATE = "a cache with a state cannot be taken back from"
EXPERTS = "all experts are counted, where a step reads the chosen ones"
POSITIONS = "a table beside a tied embedding is counted whole, where a step reads one row"
TIED_ROW = "the row of a tied embedding that the input token reads is not counted in a packed gear"
PRIVATE = "arrays that are no parameters are counted"
RAW = "a matrix that is no layer is not reported"
SEVERAL = "mlx-lm adds its boolean mask to the scores: several tokens see later ones"


def because(reason: str, *names: str) -> dict[str, str]:
    return dict.fromkeys(names, reason)


LOSSLESS = because(
    STATE,
    *["baichuan_m1", "bailing_hybrid", "bailing_moe_linear", "bailing_moe_v3", "deepseek_v41", "falcon_h1", "gear"],
    *["granitemoehybrid", "jamba", "kimi_k3", "kimi_linear", "lfm2", "lfm2-vl", "lfm2_moe", "longcat_flash_ngram"],
    *["mamba", "mamba2", "nemotron_h", "olmo_hybrid", "plamo2", "prism_hadamard_qwen35", "qwen3_5", "qwen3_5_moe"],
    *["qwen3_next", "recurrent_gemma", "rwkv7"],
) | because(SEVERAL, "phi3small")
BYTES: dict[str, str] = {}
UNMANAGED: dict[str, str] = {}
EXPECTED = {"lossless": LOSSLESS, "bytes": BYTES, "unmanaged": UNMANAGED}
