"""One streaming completion of a given length, read to its end: ``client.py URL MODEL PROMPT-TOKENS OUTPUT-TOKENS``."""

import json
import sys
import urllib.request


def main(url: str, model: str, prompt: str, output: str) -> int:
    """Status 0: all came; 1: an error in the stream."""
    body = {
        "model": model, "prompt": list(range(100, 100 + int(prompt))), "max_tokens": int(output), "min_tokens": int(output),
        "ignore_eos": True, "temperature": 0, "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }  # fmt: skip
    request = urllib.request.Request(f"{url}/v1/completions", data=json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request) as answer:
        for line in answer:
            if b'"error"' in line:
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
