# One broker, one volume, no root.  Built on any Debian 12 base: --build-arg BASE=...
ARG BASE=debian:bookworm-slim

FROM ${BASE} AS python
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3 \
    && rm -rf /var/lib/apt/lists/*

FROM python AS build
# The packages are listed before those that only the build needs.
RUN dpkg-query --show --showformat '${Package}\t${Version}\t${Architecture}\n' > /debian-packages \
    && apt-get update \
    && apt-get install --yes --no-install-recommends python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
ENV PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_QUIET=1
COPY deploy/image deploy/image
# What is fetched is a wheel with a hash of the lock files; no code of it runs but the builder's.
RUN python3 -m venv /opt/build \
    && python3 -m venv --without-pip /opt/magnetar \
    && /opt/build/bin/pip install --require-hashes --only-binary :all: -r deploy/image/build-requirements.txt \
    && /opt/build/bin/pip download --require-hashes --only-binary :all: -r deploy/image/requirements.txt --dest /wheels
COPY pyproject.toml README.md LICENSE NOTICE ./
COPY config config
COPY security security
COPY storage storage
COPY txn txn
COPY broker broker
COPY magnetar magnetar
COPY magnetar_broker magnetar_broker
RUN /opt/build/bin/pip wheel --no-index --no-deps --no-build-isolation --wheel-dir /wheels . ./magnetar_broker \
    && /opt/build/bin/pip --python /opt/magnetar/bin/python install --no-index --find-links /wheels \
       --only-binary :all: 'magnetar-broker[cluster]' \
    && python3 deploy/image/make_sbom.py /opt/magnetar/lib/python3*/site-packages /wheels /debian-packages > /sbom.json

FROM python
RUN useradd --system --uid 10001 --home-dir /data --shell /usr/sbin/nologin magnetar \
    && install -d -o magnetar -g magnetar /data
COPY --from=build /sbom.json /usr/share/doc/magnetar/sbom.json
COPY --from=build /opt/magnetar /opt/magnetar
# Secure: by TLS and a token, unless a container is told otherwise (docs/security.md).
ENV PATH=/opt/magnetar/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    MAGNETAR_DATA_DIR=/data \
    MAGNETAR_BIND_HOST=0.0.0.0 \
    MAGNETAR_SECURE=true
USER magnetar
VOLUME /data
EXPOSE 6650 6651 8080 8443
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=8s --start-period=5s \
    CMD ["magnetar", "health"]
ENTRYPOINT ["magnetar"]
CMD ["standalone"]
