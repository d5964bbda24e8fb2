"""Real vLLM engines over a bucket, and over a disk with a bucket behind it."""

from __future__ import annotations

import logging
import uuid

import pytest

from tests.integrations.vllm.conftest import SHORT, prompt, tier, wait_stored

pytestmark = pytest.mark.vllm

ACCESS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "testsecret", "AWS_EC2_METADATA_DISABLED": "true"}
PROMPTS = [prompt(1), prompt(2)]


@pytest.fixture
def bucket_url(monkeypatch):
    """A bucket of the test's own, in moto."""
    boto3 = pytest.importorskip("boto3")
    moto = pytest.importorskip("moto.server")
    for name, value in ACCESS.items():
        monkeypatch.setenv(name, value)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint, bucket = f"http://{host}:{port}", f"test-{uuid.uuid4().hex}"
    client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1")
    client.create_bucket(Bucket=bucket)
    client.close()
    yield f"s3://{bucket}/kv?endpoint_url={endpoint}"
    server.stop()


@pytest.fixture(scope="module")
def expected(plain_engine):
    """What an engine without any connector answers."""
    return plain_engine.generate(*PROMPTS)["tokens"]


def test_another_engine_starts_warm_from_the_bucket_and_fills_its_disk(start_engine, bucket_url, url, expected):
    first = start_engine(tier(bucket_url))
    assert first.generate(*PROMPTS) == {"tokens": expected, "cached": [0, 0]}
    first.generate(SHORT)
    wait_stored(bucket_url, 2)
    first.kill()
    second = start_engine(tier(url), tier(bucket_url))
    assert second.generate(*PROMPTS) == {"tokens": expected, "cached": [384, 384]}
    second.close()
    wait_stored(url, 2)
