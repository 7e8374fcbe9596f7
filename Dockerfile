# For people who want a container. The project's own checks do not build it.
#
#   docker build -t forethought .
#   docker run --rm -it -v "$PWD/runs:/home/user/runs" forethought \
#       train tdmpc2 dmc:cartpole-swingup --preset tdmpc2_small --seed 1
#
# The mounted folder must be writable for user 1000.
FROM python:3.11-slim

# gcc builds the C kernels at the first run; EGL draws MuJoCo tasks without a screen.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev libegl1 libgl1 \
    && rm -rf /var/lib/apt/lists/*

RUN useradd --create-home --uid 1000 user
WORKDIR /opt/forethought

# torch first, and without CUDA: its layer is large and changes seldom.
COPY constraints.txt ./
RUN pip install --no-cache-dir -c constraints.txt torch \
    --index-url https://download.pytorch.org/whl/cpu

COPY pyproject.toml README.md LICENSE ./
COPY src ./src
RUN pip install --no-cache-dir -c constraints.txt '.[dmc,video,report]'

USER user
WORKDIR /home/user
ENV OMP_WAIT_POLICY=PASSIVE
ENTRYPOINT ["forethought"]
CMD ["doctor"]
