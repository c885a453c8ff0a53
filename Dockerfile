# Built in one image, run in another: what only building needs stays behind.
FROM python:3.11-slim AS builder

WORKDIR /src
COPY pyproject.toml requirements.lock README.md LICENSE ./
COPY broker broker
COPY client client
COPY lua lua
COPY pipeline pipeline
# The lock names the developers' tools too: as a constraint it chooses versions, and installs nothing.
RUN python -m venv --without-pip /opt/keylane \
    && pip --python /opt/keylane/bin/python install --no-cache-dir --constraint requirements.lock .

# The same with Spark, half a gigabyte of it: a master, its workers and the jobs (docker build --target spark).
FROM builder AS spark-builder
RUN pip --python /opt/keylane/bin/python install --no-cache-dir --constraint requirements.lock '.[spark]'

FROM python:3.11-slim AS spark
RUN apt-get update && apt-get install --yes --no-install-recommends default-jre-headless procps \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --system --uid 10001 --create-home --home-dir /var/lib/keylane keylane \
    && install --directory --owner keylane /archive
COPY --from=spark-builder /opt/keylane /opt/keylane
ENV PATH=/opt/keylane/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYSPARK_PYTHON=/opt/keylane/bin/python \
    SPARK_WORKER_DIR=/var/lib/keylane/spark
USER keylane
WORKDIR /var/lib/keylane
VOLUME /archive
ENTRYPOINT ["keylane"]

FROM python:3.11-slim

RUN useradd --system --uid 10001 --create-home --home-dir /var/lib/keylane keylane
COPY --from=builder /opt/keylane /opt/keylane
ENV PATH=/opt/keylane/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    KEYLANE_HOST=0.0.0.0 \
    KEYLANE_INSECURE=1 \
    KEYLANE_DATA_DIR=/var/lib/keylane/data
USER keylane
WORKDIR /var/lib/keylane
EXPOSE 9999
ENTRYPOINT ["keylane"]
CMD ["serve"]
