# One broker, one volume, no root.  Built on any Debian 12 base: --build-arg BASE=...
ARG BASE=debian:bookworm-slim

FROM ${BASE} AS python
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3 \
    && rm -rf /var/lib/apt/lists/*

FROM python AS build
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml README.md LICENSE NOTICE ./
COPY config config
COPY security security
COPY storage storage
COPY txn txn
COPY broker broker
COPY magnetar magnetar
COPY magnetar_broker magnetar_broker
RUN python3 -m venv /opt/magnetar \
    && /opt/magnetar/bin/pip install --quiet --no-cache-dir --disable-pip-version-check . './magnetar_broker[cluster]'

FROM python
RUN useradd --system --uid 10001 --home-dir /data --shell /usr/sbin/nologin magnetar \
    && install -d -o magnetar -g magnetar /data
COPY --from=build /opt/magnetar /opt/magnetar
ENV PATH=/opt/magnetar/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    MAGNETAR_DATA_DIR=/data \
    MAGNETAR_BIND_HOST=0.0.0.0
USER magnetar
VOLUME /data
EXPOSE 6650 8080
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=3s --start-period=5s \
    CMD ["magnetar", "health"]
ENTRYPOINT ["magnetar"]
CMD ["standalone"]
