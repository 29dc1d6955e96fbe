"""Trusted certificates are read once, not by every client; another bundle, or a replaced one, is read."""

from __future__ import annotations

import os
import shutil
import ssl
from pathlib import Path

import pytest
from aiobotocore.httpsession import get_cert_path
from everstep.backends.s3options import session_options
from everstep.backends.s3trust import Session


def test_clients_share_what_is_trusted_until_the_bundle_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = tmp_path / "trusted.pem"
    shutil.copy(get_cert_path(True), bundle)
    read = []
    load = ssl.SSLContext.load_verify_locations

    def counted(self: ssl.SSLContext, *places: object) -> None:
        read.append(places)
        load(self, *places)  # type: ignore[arg-type]

    monkeypatch.setattr(ssl.SSLContext, "load_verify_locations", counted)
    contexts = [Session(verify=str(bundle))._build_ssl_contexts(None)[0] for _ in range(3)]
    assert len(read) == 1 and contexts[0] is contexts[1] is contexts[2]
    assert contexts[0].verify_mode is ssl.CERT_REQUIRED and contexts[0].check_hostname
    assert contexts[0].cert_store_stats()["x509_ca"] > 10

    os.utime(bundle, ns=(1, 1))
    assert Session(verify=str(bundle))._build_ssl_contexts(None)[0] is not contexts[0]
    assert len(read) == 2

    trusting = Session(verify=False)._build_ssl_contexts(None)[0]
    assert trusting.verify_mode is ssl.CERT_NONE
    assert Session(verify=str(bundle))._build_ssl_contexts(None)[0].verify_mode is ssl.CERT_REQUIRED


def test_clients_are_made_that_way_unless_told_otherwise() -> None:
    assert session_options("s3://b", {})["config_kwargs"]["http_session_cls"] is Session
