"""A small real HTTP process that speaks the routes of vLLM or of SGLang, whichever command line it is given.

    python fake_engine.py --uds SOCKET --model FOLDER --max-model-len 512 …
    python fake_engine.py --port PORT --config KEYS.yaml --model-path FOLDER --context-length 512 …

`fake_core.py` says what it answers and how it misbehaves on request; `fake_vllm.py` and `fake_sglang.py` say it in the
words of each engine. `tests/engines/test_routes.py` holds it to what the real ones answer.
"""

import sys

import fake_sglang
import fake_vllm

if __name__ == "__main__":
    (fake_vllm if "--uds" in sys.argv else fake_sglang).main()
