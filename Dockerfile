# The one image of Airflow's parts and of Spark's master and workers: drivers and executors need the same Python.
FROM python:3.11.14-slim-bookworm

# DL3008: Debian keeps one version of a package in a release, and the base image's tag names the release.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends openjdk-17-jre-headless procps tini \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 50000 --gid 0 kalman \
    && mkdir -p /opt/kalman /warehouse /landing /logs \
    && chown -R kalman:0 /opt/kalman /warehouse /landing /logs

WORKDIR /opt/kalman
COPY requirements/image.txt requirements/image.txt
COPY pyproject.toml README.md LICENSE ./
COPY kalman kalman
COPY jobs jobs
COPY dags dags
COPY plugins plugins
COPY models models
COPY scripts/entrypoint scripts/entrypoint
# Every file that is installed has the SHA-256 of the one that was tested; what builds PySpark's too, so it comes first.
# Spark's jars, with those for Kafka and S3, are fetched here, once, so that a container starts offline; their SHA-256 is in jobs/spark/jars.sha256.
RUN grep '^setuptools==' requirements/image.txt > /tmp/build.txt \
    && pip install --no-cache-dir --require-hashes --requirement /tmp/build.txt \
    && pip install --no-cache-dir --require-hashes --no-deps --no-build-isolation --requirement requirements/image.txt \
    && pip install --no-cache-dir --no-deps --no-build-isolation --no-index --editable . \
    && pip check \
    && rm /tmp/build.txt \
    && python -m jobs.spark.jars kafka s3 \
    && python -m jobs.warm_up

USER 50000
ENV AIRFLOW_HOME=/home/kalman/airflow \
    AIRFLOW__CORE__DAGS_FOLDER=/opt/kalman/dags \
    AIRFLOW__CORE__PLUGINS_FOLDER=/opt/kalman/plugins \
    KALMAN_WAREHOUSE=/warehouse \
    KALMAN_MODELS=/opt/kalman/models \
    PYSPARK_PYTHON=/usr/local/bin/python \
    PYTHONPATH=/opt/kalman \
    PYTHONUNBUFFERED=1
# It also knows what Spark asks of a container in Kubernetes.
ENTRYPOINT ["tini", "--", "/opt/kalman/scripts/entrypoint"]
CMD ["kalman-pipeline", "--help"]
