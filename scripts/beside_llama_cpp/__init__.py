"""What compare_llama_cpp.py consists of: a Llama as GGUF, llama.cpp's side, what is timed, and the tables."""
