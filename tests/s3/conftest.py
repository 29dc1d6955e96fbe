from __future__ import annotations

import pytest
from botocore.exceptions import ClientError

from tests.facade.conftest import forked, node

from .server import S3Server

__all__ = ["forked", "node"]


@pytest.fixture(scope="session")
def checks_crc32(s3_server: S3Server) -> bool:
    """Whether the server refuses a part with a wrong crc32, as another client finds."""
    client, place = s3_server.client(), {"Bucket": s3_server.bucket, "Key": f"{s3_server.prefix}/crc32"}
    upload = client.create_multipart_upload(**place, ChecksumAlgorithm="CRC32")["UploadId"]
    try:
        client.upload_part(**place, UploadId=upload, PartNumber=1, Body=b"1", ChecksumCRC32="AAAAAA==")
    except ClientError:
        return True
    finally:
        client.abort_multipart_upload(**place, UploadId=upload)
    return False
