# A node in a container:
#   docker build -t dfca .
#   docker run -it --rm -v "$PWD/kitchen:/node" -v "$PWD/data:/data:ro" dfca init /node --data /data/a.csv --label activity
#   docker run -d --restart unless-stopped --network host -v "$PWD/kitchen:/node" -v "$PWD/data:/data:ro" dfca run /node
# For computers and for boards with a 64-bit ARM (every package of the extra `node` has wheels for both):
#   docker buildx build --platform linux/amd64,linux/arm64 -t REGISTRY/dfca --push .
# With --network host the addresses that the node announces are those of the machine. Without it, publish ports 7447 and
# 7448 and set network.advertise in node.toml.
FROM python:3.12-slim

# A node without a GPU needs torch's builds for the CPU only, which are a tenth of the size; they have an index of their
# own: docker build --build-arg TORCH_INDEX=<its address> -t dfca .
ARG TORCH_INDEX=
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
RUN pip install --no-cache-dir ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} '.[node]' && rm -rf /src/*

# The key must belong to the user that runs the node: make the folder with the same user, or use --user.
RUN useradd --create-home --uid 1000 dfca && mkdir /node && chown dfca /node
USER dfca
WORKDIR /node
VOLUME /node
EXPOSE 7447 7448
STOPSIGNAL SIGTERM
ENTRYPOINT ["dfca", "node"]
CMD ["run", "/node"]
