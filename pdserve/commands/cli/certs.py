"""`pdserve certs`: makes a cluster's CA, and certificates of its processes, for a start."""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pdserve.shared.errors import ConfigError
from pdserve.shared.hints.extras import how_to_install
from pdserve.shared.process.certificates import CA_FILE, CERT_FILE, KEY_FILE, Role, role_name
from pdserve.shared.process.exit_codes import OK

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

CA_KEY_FILE = "ca.key"
_CA_DAYS = 3650
_DNS_NAME = re.compile(r"(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")


def run(directory: Path, role: Role, hosts: Sequence[str], days: int) -> int:
    """Make DIRECTORY/ROLE, and the CA in DIRECTORY if there is none; the exit code.

    Run again, it renews the certificate under the same CA.

    Raises:
        ConfigError: `cryptography` is not installed, files cannot be read or written, or a host or
            the days are none.
    """
    try:
        import cryptography  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"this needs an extra: {how_to_install('certs')}") from error
    if days < 1:
        raise ConfigError(f"--days {days}: a certificate is valid for a day at least")
    try:
        made = make(directory, role, hosts, datetime.timedelta(days=days))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot make certificates in {directory}: {error}") from error
    print(f"{made} has {CA_FILE}, {CERT_FILE} and {KEY_FILE}, valid for {days} days: copy it to")
    use = "start it there with --set security.tls_dir=DIR"
    if role == "monitor":
        use = "name the files in Prometheus' tls_config, with server_name: node.pdserve"
    print(f"the {role}'s machine, and {use}.")
    print(f"{directory / CA_KEY_FILE} signs certificates: keep it off all of these machines.")
    return OK


def make(directory: Path, role: Role, hosts: Sequence[str], valid: datetime.timedelta) -> Path:
    """Make or renew a role's certificate; returns the directory with it and the CA's."""
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID

    authority, authority_key = _authority(directory)
    key = ec.generate_private_key(ec.SECP256R1())
    names = [x509.DNSName(role_name(role)), *(_name(host) for host in hosts)]
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    certificate = (
        _builder(f"pdserve {role}", valid)
        .issuer_name(authority.subject)
        .public_key(key.public_key())
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(_issuer(authority_key), critical=False)
    )
    made = directory / role
    _write_key(made / KEY_FILE, key)
    encoding = serialization.Encoding.PEM
    _write(made / CERT_FILE, _sign(certificate, authority_key).public_bytes(encoding))
    _write(made / CA_FILE, authority.public_bytes(encoding))
    return made


def _authority(directory: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """The CA of a directory, which is made if there is none."""
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    if (directory / CA_KEY_FILE).exists():
        password = None
        key = serialization.load_pem_private_key((directory / CA_KEY_FILE).read_bytes(), password)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ValueError(f"{CA_KEY_FILE} is no key that pdserve certs has made")
        return x509.load_pem_x509_certificate((directory / CA_FILE).read_bytes()), key
    key = ec.generate_private_key(ec.SECP256R1())
    builder = _builder("pdserve CA", datetime.timedelta(days=_CA_DAYS))
    certificate = _sign(
        builder.issuer_name(_subject("pdserve CA"))
        .public_key(key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False),
        key,
    )
    _write(directory / CA_FILE, certificate.public_bytes(serialization.Encoding.PEM))
    _write_key(directory / CA_KEY_FILE, key)
    return certificate, key


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _issuer(key: ec.EllipticCurvePrivateKey) -> x509.AuthorityKeyIdentifier:
    """Tells CAs of one name apart, so that a wrong one is called unknown, not its signature bad."""
    from cryptography import x509

    return x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key())


def _builder(name: str, valid: datetime.timedelta) -> x509.CertificateBuilder:
    from cryptography import x509

    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(_subject(name))
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))  # the others' clocks may be behind
        .not_valid_after(now + valid)
    )


def _subject(name: str) -> x509.Name:
    from cryptography import x509

    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])


def _sign(builder: x509.CertificateBuilder, key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    from cryptography.hazmat.primitives import hashes

    return builder.sign(key, hashes.SHA256())


def _name(host: str) -> x509.GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        if not _DNS_NAME.fullmatch(host):
            raise ValueError(f"--host {host!r} is neither a name nor an IP address") from None
        return x509.DNSName(host)


def _write_key(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    from cryptography.hazmat.primitives import serialization

    pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    _write(path, pem)


def _write(path: Path, data: bytes) -> None:
    """Replace a file in one step by one that only its owner can read."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.new")
    new.unlink(missing_ok=True)
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
    new.rename(path)
