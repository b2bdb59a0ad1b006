"""As much of curl as docs/http.md uses, for machines that have none."""

import sys
import urllib.error
import urllib.request
from pathlib import Path


def read_arguments(words):
    found = {"headers": {}, "method": None, "data": None, "out": None, "head": None, "url": None}
    words = iter(words)
    for word in words:
        if word == "-s":
            continue
        if word == "-H":
            name, _, value = next(words).partition(":")
            found["headers"][name] = value.strip()
        elif word == "-d":
            text = next(words)
            found["data"] = (
                Path(text[1:]).read_bytes().replace(b"\n", b"") if text[0] == "@" else text.encode()
            )
            found["method"] = found["method"] or "POST"
        elif word == "-T":
            found["data"], found["method"] = Path(next(words)).read_bytes(), "PUT"
            found["headers"]["Content-Type"] = "application/octet-stream"
        elif word in ("-X", "-o", "-D"):
            found[{"-X": "method", "-o": "out", "-D": "head"}[word]] = next(words)
        else:
            assert not word.startswith("-"), f"curl stand-in: {word} is unknown"
            found["url"] = word
    return found


def main():
    asked = read_arguments(sys.argv[1:])
    request = urllib.request.Request(
        asked["url"], asked["data"], asked["headers"], method=asked["method"] or "GET"
    )
    try:
        answer = urllib.request.urlopen(request, timeout=30)
    except urllib.error.HTTPError as error:
        answer = error
    with answer:
        body = answer.read()
        if asked["head"]:
            Path(asked["head"]).write_text(f"HTTP/1.1 {answer.status}\n{answer.headers}")
    if asked["out"]:
        Path(asked["out"]).write_bytes(body)
    else:
        sys.stdout.buffer.write(body)


main()
