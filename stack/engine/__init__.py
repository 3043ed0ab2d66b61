"""The CPU engine: a real causal LM in torch behind SGLang's HTTP contract, for machines without a GPU.

It serves any Llama-, Qwen3- or Qwen3-MoE-style Hugging Face checkpoint directory. One thread runs the model with
continuous batching (`scheduler`), one event loop answers HTTP (`server`); the two exchange `Generation`
objects.

checkpoint   config.json and safetensors to a `ModelSpec` and `Weights`
model        the forward pass over slots of a key-value cache (`kvcache`)
experts      a mixture of experts, and which of them a position was routed to
sampling     draws tokens from logits; the noise depends on seed and position alone
contract     the HTTP bodies: what is accepted, what is refused and how, what is answered
generation   one request's life: tokens, log-probs, version spans, finish reason
prefixes     keys and values of finished requests, for the next turn
prefill      runs the tokens that are known
batch        the running requests as rows of numpy columns
scheduler    the loop: admit, prefill, decode, pause, retract, change weights
generate     `/generate`;  control: every other endpoint;  asgi: the few moves both need;  text: the tokenizer
server       the ASGI application; `python -m stack.engine` starts it
launch       starts the engine as a child process and waits until it is healthy

Where it differs from SGLang 0.5.23, on purpose: an abort matches the whole request id, never a prefix, and
reaches queued and paused requests at once; a client that goes away ends its request at once; a token id out
of the vocabulary is a 400 and not a crash; cached keys of old weights are never reused, not even with
`flush_cache: false`; `/health` runs no generation; one prompt and one sample per request.
"""
