//! containerd with its registries, a client, and a registry that does what the test wants.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kruise_cri::client::Client;
use kruise_cri::{Error, PullCause, PullRequest, Runtime as _};
use kruise_daemon::image_pull::act::Attempt;
use kruise_daemon::image_pull::plan::keyring::Credentials;
use testbed::cluster::{REGISTRY_USER, Runtime};

use support::fake_registry::FakeRegistry;

pub struct Bed {
    pub runtime: Runtime,
    pub client: Arc<Client>,
    pub registry: FakeRegistry,
}

/// Tries again and again while the runtime says that it is starting: it listens before it is ready to answer.
async fn when_it_is_up<T>(attempt: impl AsyncFn() -> Result<T, Error>) -> T {
    let start = Instant::now();
    loop {
        match attempt().await {
            Ok(done) => return done,
            Err(error) => assert!(
                matches!(error, Error::Unreachable { .. }) && start.elapsed() < Duration::from_secs(60),
                "after a start: {error:?}"
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
        let socket = runtime.socket();
        let (client, _) = when_it_is_up(async || Client::connect(&socket).await).await;
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

    /// Pulls with the client from before a restart.
    pub async fn pull_when_it_is_up(&self, image: &str) {
        when_it_is_up(async || self.pull(image).await).await;
    }

    /// Waits until so many bytes are there; no event tells of bytes.
    pub async fn until_bytes(&self, image: &str, wanted: u64) -> kruise_cri::Bytes {
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
