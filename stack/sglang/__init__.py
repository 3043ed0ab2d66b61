"""Real SGLang on a machine without a GPU, as one more engine behind the proxy.

environment   its own virtual environment in the per-user cache, made once from `requirements.lock`
command       the flags and variables with which SGLang serves on CPU
launch        `python -m stack.sglang.launch`: SGLang as one process group that ends as a whole
shim          a package for that environment: what stands in for SGLang's compiled CPU kernels

Its pins and those of Faust exclude each other, so nothing here imports SGLang: it is only started.
"""
