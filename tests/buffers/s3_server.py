"""A real S3-compatible server on loopback, in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from threading import Thread
from unittest.mock import patch

import pytest

needs_s3 = pytest.mark.skipif(
    find_spec("s3fs") is None or find_spec("moto") is None, reason="needs the packages s3fs and moto[server]"
)

BUCKET = "experience"


@contextmanager
def s3_server() -> Iterator[str]:
    """Start the server with an empty bucket, and point the environment at it as a user would; the bucket's URL."""
    command = [sys.executable, "-m", "moto.server", "--host", "127.0.0.1", "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    drain = None
    try:
        lines = []
        for line in server.stderr:
            lines.append(line)
            if found := re.search(r"Running on (http://127\.0\.0\.1:\d+)", line):
                break
        else:
            raise RuntimeError(f"the S3 server did not start: {''.join(lines)}")
        drain = Thread(target=server.stderr.read)  # it tells of every request, and would stop when nobody listens
        drain.start()
        environment = {
            "AWS_ENDPOINT_URL": found[1],
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        with patch.dict(os.environ, environment):
            import fsspec

            fs = fsspec.filesystem("s3", skip_instance_cache=True)
            fs.mkdir(BUCKET)
            fs.clear_instance_cache()
            yield f"s3://{BUCKET}"
            fs.clear_instance_cache()
    finally:
        server.terminate()
        server.wait()
        if drain is not None:
            drain.join()
        server.stderr.close()
