//! containerd with its registries, a client, and a registry that the test controls.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kruise_cri::client::CriClient;
use kruise_cri::{Error, PullCause, PullRequest, Runtime as _};
use kruise_daemon::image_pull::act::{PullAttempt, SourcedCredentials};
use kruise_daemon::image_pull::plan::keyring::Credentials;
use testbed::cluster::{REGISTRY_USER, Runtime};

use support::fake_registry::FakeRegistry;

pub struct RuntimeFixture {
    pub runtime: Runtime,
    pub client: Arc<CriClient>,
    pub registry: FakeRegistry,
}

/// Retries while the runtime reports that it is starting: it listens before it is ready to respond.
async fn retry_until_up<T>(attempt: impl AsyncFn() -> Result<T, Error>) -> T {
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

impl RuntimeFixture {
    pub async fn start(suite: &'static str) -> Self {
        let runtime = tokio::task::spawn_blocking(move || Runtime::start(suite))
            .await
            .unwrap()
            .unwrap();
        let socket = runtime.socket();
        let (client, _) = retry_until_up(async || CriClient::connect(&socket).await).await;
        let registry = FakeRegistry::start().await;
        let url = format!("http://{}:{}", runtime.host_address(), registry.port());
        runtime.registry.add_registry_host("fake.test", &url).unwrap();
        Self {
            runtime,
            client: Arc::new(client),
            registry,
        }
    }

    pub async fn pull(&self, image: &str) -> Result<String, Error> {
        self.client.pull_image(&pull_request(image)).await
    }

    pub fn spawn_pull(&self, image: &str) -> tokio::task::JoinHandle<Result<String, Error>> {
        let (client, request) = (Arc::clone(&self.client), pull_request(image));
        tokio::spawn(async move { client.pull_image(&request).await })
    }

    /// Pulls with the client from before a restart.
    pub async fn pull_after_restart(&self, image: &str) {
        retry_until_up(async || self.pull(image).await).await;
    }

    /// Waits until at least `min_done` bytes are downloaded; polls, as there is no event for bytes.
    pub async fn wait_for_bytes(&self, image: &str, min_done: u64) -> kruise_cri::DownloadProgress {
        let start = Instant::now();
        loop {
            let bytes = self.client.pull_progress(image).await.unwrap();
            if let Some(bytes) = bytes.filter(|b| b.downloaded >= min_done) {
                return bytes;
            }
            assert!(
                start.elapsed() < Duration::from_secs(60),
                "after 60 s only {bytes:?} of {min_done} bytes of {image}"
            );
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

pub fn pull_request(image: &str) -> PullRequest {
    PullRequest {
        image: image.to_owned(),
        timeout: Duration::from_secs(90),
        ..Default::default()
    }
}

pub fn pull_attempt(image: &str, credentials: Vec<Credentials>) -> PullAttempt {
    let credentials = credentials.into_iter().map(SourcedCredentials::of_node);
    PullAttempt {
        image: image.to_owned(),
        always: false,
        timeout: Duration::from_secs(90),
        credentials: credentials.collect(),
        anonymous: false,
        labels: BTreeMap::new(),
        annotations: BTreeMap::new(),
        check_disk: true,
        span: None,
    }
}

pub fn credentials(password: &str) -> Credentials {
    Credentials {
        username: REGISTRY_USER.to_owned(),
        password: password.to_owned(),
        ..Default::default()
    }
}

pub fn pull_failure_cause(result: Result<String, Error>) -> PullCause {
    match result {
        Err(Error::Pull { cause, message, .. }) => {
            println!("{cause:?}: {message}");
            cause
        }
        other => panic!("expected a failed pull, got {other:?}"),
    }
}
