"""What fails, by kind of test, with a short reason. When one is mended, its line goes: a strict test says so."""

SEVERAL = "mlx-lm adds its boolean mask to the scores: several tokens see later ones, and a warning says so"
IDENTITY = "an upper bound: some of the chosen experts have no weights"
SHARED = "an upper bound: layers that use the keys and values of others have projections that nothing reads"
NO_EFFECT = "an upper bound: the class reads arrays that change nothing"

LOSSLESS = {"phi3small": SEVERAL}
BYTES = {"longcat_flash": IDENTITY, "longcat_flash_ngram": IDENTITY, "gemma3n": SHARED, "kimi_k3": NO_EFFECT}
UNMANAGED: dict[str, str] = {}
EXPECTED = {"lossless": LOSSLESS, "bytes": BYTES, "unmanaged": UNMANAGED}
