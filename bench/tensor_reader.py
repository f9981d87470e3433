"""Takes the tensors of all safetensors files of a bucket, for stream_tensors.py: a program of its
own on the host whose agent it asks.

`tensor_reader.py runai|boto3 BUCKET PORT METRICS` prints "ready", waits for a line, and begins.
Prints when the first and the last tensor were in memory, in seconds of the machine's monotonic
clock, how many bytes METRICS said had come to the agent at the first one, and the SHA-256 of each
tensor. `tensor_reader.py files DIRECTORY` prints the last for files.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

LENGTH_BYTES = 8
RECEIVED = "p2pdist_agent_received_bytes_total"


def boto3_tensors(bucket: str, port: str) -> Iterator[tuple[str, bytes]]:
    """A request for each tensor, in the order of files and places."""
    import boto3
    from botocore.client import Config

    config = Config(s3={"addressing_style": "path"}, proxies={}, read_timeout=300)
    address = {"endpoint_url": f"http://127.0.0.1:{port}", "region_name": "us-east-1"}
    client = boto3.client("s3", aws_access_key_id="any", aws_secret_access_key="any", config=config, **address)
    yield "", b""  # what takes long to import is there

    def read(key: str, start: int, length: int) -> bytes:
        got = client.get_object(Bucket=bucket, Key=key, Range=f"bytes={start}-{start + length - 1}")
        return bytes(got["Body"].read())

    keys = [entry["Key"] for entry in client.list_objects_v2(Bucket=bucket)["Contents"]]
    for key in sorted(key for key in keys if key.endswith(".safetensors")):
        length = int.from_bytes(read(key, 0, LENGTH_BYTES), "little")
        for name, start, end in places(read(key, LENGTH_BYTES, length)):
            yield name, read(key, LENGTH_BYTES + length + start, end - start)


def runai_tensors(bucket: str, port: str) -> Iterator[tuple[str, bytes]]:
    """As vLLM has Run:ai's model streamer take them."""
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "any",
        "AWS_SECRET_ACCESS_KEY": "any",
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0",
    }
    from runai_model_streamer import SafetensorsStreamer, list_safetensors

    yield "", b""
    with SafetensorsStreamer() as streamer:
        streamer.stream_files(list_safetensors(f"s3://{bucket}/"))
        for name, tensor in streamer.get_tensors():
            yield name, tensor.numpy().tobytes()


def file_tensors(directory: Path) -> Iterator[tuple[str, bytes]]:
    """What is in the files of a directory."""
    for path in sorted(directory.glob("*.safetensors")):
        data = path.read_bytes()
        length = int.from_bytes(data[:LENGTH_BYTES], "little")
        body = data[LENGTH_BYTES + length :]
        for name, start, end in places(data[LENGTH_BYTES : LENGTH_BYTES + length]):
            yield name, body[start:end]


def places(header: bytes) -> Iterator[tuple[str, int, int]]:
    """Names of tensors, and where they lie behind the header, in that order."""
    entries = {name: entry["data_offsets"] for name, entry in json.loads(header).items() if name != "__metadata__"}
    for name, (start, end) in sorted(entries.items(), key=lambda entry: entry[1]):
        yield name, start, end


def received_bytes(metrics: str) -> int:
    """What has come to an agent so far."""
    with urllib.request.urlopen(metrics) as response:
        lines = response.read().decode().splitlines()
    return int(sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(RECEIVED)))


def main() -> None:
    """Read, and report."""
    kind, *rest = sys.argv[1:]
    digests: dict[str, str] = {}
    if kind == "files":
        digests = {name: hashlib.sha256(data).hexdigest() for name, data in file_tensors(Path(rest[0]))}
        print(json.dumps({"tensors": digests}))
        return
    bucket, port, metrics = rest
    tensors = (runai_tensors if kind == "runai" else boto3_tensors)(bucket, port)
    next(tensors)
    print("ready", flush=True)
    sys.stdin.readline()
    first = last = 0.0
    first_bytes = 0
    for name, data in tensors:
        last = time.monotonic()
        if not digests:
            first, first_bytes = last, received_bytes(metrics)
        digests[name] = hashlib.sha256(data).hexdigest()
    print(json.dumps({"first": first, "first_bytes": first_bytes, "last": last, "tensors": digests}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
