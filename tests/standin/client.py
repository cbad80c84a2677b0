"""Streaming completions of given lengths, sent together and read to their ends: ``client.py URL MODEL PROMPT-TOKENS OUTPUT…``.

The exit status is the number of streams that failed.
"""

import http.client
import json
import sys
import threading
import urllib.parse

failed: list[object] = []


def stream(host: str, port: int, body: dict[str, object], together: threading.Barrier) -> None:
    """One stream; the connection is there before the first request goes out."""
    connection = http.client.HTTPConnection(host, port)
    try:
        connection.connect()
        together.wait()
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        whole = answer.status == 200
        last = b""
        for line in answer:
            whole = whole and b'"error"' not in line
            last = line.strip() or last
        if not whole or last != b"data: [DONE]":
            failed.append(body["max_tokens"])
    except (OSError, http.client.HTTPException):
        failed.append(body["max_tokens"])
    finally:
        connection.close()


def main(url: str, model: str, prompt: str, *lengths: str) -> int:
    """All streams, a thread each."""
    where = urllib.parse.urlsplit(url)
    together = threading.Barrier(len(lengths))
    threads = []
    for place, length in enumerate(lengths):
        body = {
            "model": model, "prompt": list(range(100, 100 + int(prompt) + place)), "max_tokens": int(length),
            "min_tokens": int(length), "ignore_eos": True, "temperature": 0, "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }  # fmt: skip
        threads.append(threading.Thread(target=stream, args=(where.hostname, where.port, body, together)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    return len(failed)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
