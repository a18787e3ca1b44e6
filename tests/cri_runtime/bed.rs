//! containerd with its registries, a client, and a registry that does what the test wants.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kruise::cri::client::Client;
use kruise::cri::{Error, PullCause, PullRequest, Runtime as _};
use kruise::node::image_pull::act::Attempt;
use kruise::node::image_pull::plan::keyring::Credentials;
use xtask::cluster::{REGISTRY_USER, Runtime};

use crate::support::fake_registry::FakeRegistry;

pub struct Bed {
    pub runtime: Runtime,
    pub client: Arc<Client>,
    pub registry: FakeRegistry,
}

/// A client of containerd, which listens before it is ready to answer.
async fn connect(socket: &Path) -> Client {
    let start = Instant::now();
    loop {
        match Client::connect(socket).await {
            Ok((client, _)) => return client,
            Err(error) => assert!(
                matches!(error, Error::Unreachable { .. }) && start.elapsed() < Duration::from_secs(60),
                "after its start: {error:?}"
            ),
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

impl Bed {
    pub async fn start(suite: &'static str) -> Self {
        let runtime = tokio::task::spawn_blocking(move || Runtime::start(suite))
            .await
            .unwrap()
            .unwrap();
        let client = connect(&runtime.socket()).await;
        let registry = FakeRegistry::start().await;
        let url = format!("http://{}:{}", runtime.host_address(), registry.port());
        runtime.registry.serve("fake.test", &url).unwrap();
        Self {
            runtime,
            client: Arc::new(client),
            registry,
        }
    }

    pub async fn pull(&self, image: &str) -> Result<String, Error> {
        self.client.pull_image(&request(image)).await
    }

    pub fn begin(&self, image: &str) -> tokio::task::JoinHandle<Result<String, Error>> {
        let (client, request) = (Arc::clone(&self.client), request(image));
        tokio::spawn(async move { client.pull_image(&request).await })
    }

    /// Pulls with the client from before a restart, again and again while the runtime says that it is starting.
    pub async fn pull_when_it_is_up(&self, image: &str) {
        let start = Instant::now();
        while let Err(error) = self.pull(image).await {
            let starting = matches!(error, Error::Unreachable { .. });
            assert!(
                starting && start.elapsed() < Duration::from_secs(60),
                "after a restart: {error:?}"
            );
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    /// Waits until so many bytes are there; no event tells of bytes.
    pub async fn until_bytes(&self, image: &str, wanted: u64) -> kruise::cri::Bytes {
        let start = Instant::now();
        loop {
            let bytes = self.client.pull_progress(image).await.unwrap();
            if let Some(bytes) = bytes.filter(|b| b.done >= wanted) {
                return bytes;
            }
            assert!(
                start.elapsed() < Duration::from_secs(60),
                "after 60 s only {bytes:?} of {wanted} bytes of {image}"
            );
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

pub fn request(image: &str) -> PullRequest {
    PullRequest {
        image: image.to_owned(),
        timeout: Duration::from_secs(90),
        ..Default::default()
    }
}

pub fn attempt_of(image: &str, credentials: Vec<Credentials>) -> Attempt {
    Attempt {
        image: image.to_owned(),
        always: false,
        timeout: Duration::from_secs(90),
        credentials,
        labels: BTreeMap::new(),
        annotations: BTreeMap::new(),
    }
}

pub fn login(password: &str) -> Credentials {
    Credentials {
        username: REGISTRY_USER.to_owned(),
        password: password.to_owned(),
        ..Default::default()
    }
}

pub fn cause(result: Result<String, Error>) -> PullCause {
    match result {
        Err(Error::Pull { cause, message, .. }) => {
            println!("{cause:?}: {message}");
            cause
        }
        other => panic!("expected a failed pull, got {other:?}"),
    }
}
