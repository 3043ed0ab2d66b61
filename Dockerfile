# One image for every part of Hoofprint; the command chooses the part. Never started where it was written: see README.
FROM python:3.11-slim

RUN apt-get update \
    && apt-get install -y --no-install-recommends openjdk-17-jre-headless tini \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /app
COPY pyproject.toml requirements.lock README.md LICENSE ./
RUN pip install --no-cache-dir uv==0.13.9 \
    && UV_COMPILE_BYTECODE=1 uv pip sync --system --require-hashes requirements.lock

COPY schemas schemas
COPY journal journal
COPY proxy proxy
COPY streams streams
COPY trainer trainer
COPY analytics analytics
COPY rollout rollout
COPY stack stack
RUN uv pip install --system --no-deps --no-build-isolation .

RUN useradd --create-home hoofprint && mkdir /runs && chown hoofprint /runs
USER hoofprint
WORKDIR /runs
ENTRYPOINT ["tini", "--"]
CMD ["hoofprint", "--help"]
