"""The passwords and certificates that a function fetches before its first invocation.

Hosts of the stack (deploy/terraform) have scripts for this. An environment variable of a function can be read by
whoever may describe the function, so these variables only name secrets and files.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from doll.errors import ConfigError
from doll.formats.registry import CA_ENV
from doll.provisioner.fleets.ec2.client import aws_client, aws_errors
from doll.records.bounded import short
from doll.services import KAFKA_CA_ENV, REDIS_CA_ENV

SECRETS_ENV: Final = "DOLL_BOOT_SECRETS"
"""Names of secrets in Secrets Manager, with blanks between. Each contains lines NAME=VALUE for the environment."""
AUTHORITIES_ENV: Final = "DOLL_BOOT_CERT_AUTHORITIES"
"""Names of authorities, with blanks between. Their certificates are `ca/NAME.pem` in the bucket of `BUCKET_ENV`."""
BUCKET_ENV: Final = "DOLL_BOOT_BUCKET"
_FILES: Final = {"kafka": KAFKA_CA_ENV, "cache": REDIS_CA_ENV, "registry": CA_ENV}


def fetch() -> None:
    """Set the environment variables that the secrets contain, and write the certificates to the files that the
    environment names. Nothing is done if the environment names none. Raises ConfigError if AWS refuses."""
    what = ""
    try:
        if names := os.environ.get(SECRETS_ENV, "").split():
            secrets = aws_client("secretsmanager", None)
            for what in names:
                for line in secrets.get_secret_value(SecretId=what)["SecretString"].splitlines():
                    key, equals, value = line.strip().partition("=")
                    if equals:
                        os.environ[key] = value
        if authorities := os.environ.get(AUTHORITIES_ENV, "").split():
            bucket = aws_client("s3", None)
            for name in authorities:
                what = f"s3://{os.environ[BUCKET_ENV]}/ca/{name}.pem"
                body = bucket.get_object(Bucket=os.environ[BUCKET_ENV], Key=f"ca/{name}.pem")["Body"].read()
                Path(os.environ[_FILES[name]]).write_bytes(body)
    except KeyError as error:
        raise ConfigError(f"{AUTHORITIES_ENV}: expected {error} in the function's environment") from error
    except aws_errors() as error:
        raise ConfigError(f"{what}: {short(error)}: allow it to the function's role, or correct the name") from error
