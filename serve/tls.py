"""HTTPS: the files of a certificate, checked before a model is loaded."""

import argparse
import ssl
from dataclasses import dataclass
from pathlib import Path

from jaxspec.errors import ConfigError


@dataclass(frozen=True)
class Tls:
    """
    Attributes:
        certfile, keyfile: PEM files; without a key file the certificate's has the key too.
        ca_certs: authorities that sign the certificates of clients.
        cert_reqs: 0 asks clients for no certificate, 1 takes one, 2 requires one.
    """

    certfile: Path
    keyfile: Path | None = None
    keyfile_password: str | None = None
    ca_certs: Path | None = None
    cert_reqs: int = 0

    def context(self) -> ssl.SSLContext:
        """
        Raises:
            ConfigError: the files cannot be used.
        """
        names = f"--ssl-certfile {self.certfile}" + (f" and --ssl-keyfile {self.keyfile}" if self.keyfile else "")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.verify_mode = ssl.VerifyMode(self.cert_reqs)
        # Without a password OpenSSL would ask for one on the terminal.
        password = self.keyfile_password or ""
        try:
            context.load_cert_chain(self.certfile, self.keyfile, lambda: password)
        except (ssl.SSLError, ValueError) as e:  # a password that is too long is a ValueError
            hint = "" if self.keyfile_password else ", or the key needs --ssl-keyfile-password"
            raise ConfigError(f"cannot use {names}: no certificate with its key in PEM format{hint}") from e
        except OSError as e:
            raise ConfigError(f"cannot use {names}: {e.strerror}") from e
        if self.ca_certs is not None:
            try:
                context.load_verify_locations(self.ca_certs)
            except OSError as e:
                why = "no certificates in PEM format" if isinstance(e, ssl.SSLError) else e.strerror
                raise ConfigError(f"cannot use --ssl-ca-certs {self.ca_certs}: {why}") from e
        return context


def tls_of(arguments: argparse.Namespace) -> Tls | None:
    """What the flags ask for; None for plain HTTP.

    Raises:
        ConfigError: the files cannot be used, or the flags contradict each other.
    """
    if arguments.ssl_certfile is None:
        for name in ("ssl_keyfile", "ssl_ca_certs", "ssl_cert_reqs"):
            if getattr(arguments, name):
                raise ConfigError(f"--{name.replace('_', '-')} needs --ssl-certfile")
        return None
    if arguments.ssl_cert_reqs and arguments.ssl_ca_certs is None:
        raise ConfigError("--ssl-cert-reqs needs --ssl-ca-certs: who signs the certificates of clients")
    tls = Tls(
        arguments.ssl_certfile,
        arguments.ssl_keyfile,
        arguments.ssl_keyfile_password,
        arguments.ssl_ca_certs,
        arguments.ssl_cert_reqs,
    )
    tls.context()  # a wrong file is an error before a model is loaded
    return tls
