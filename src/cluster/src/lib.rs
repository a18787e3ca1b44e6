//! Kubernetes plumbing: the only place that calls an API server.
//!
//! In:  a kubeconfig or the service account of the Pod.
//! Out: a client whose calls have deadlines and metrics, stores of watched kinds, the API server's clock, and an event
//!      recorder that never blocks its caller.

use std::sync::Arc;

use futures::future::BoxFuture;
use kube::api::ListParams;
use kube::{Api, Resource};
use serde::de::DeserializeOwned;

use kruise_ops::Watches;

mod bounded;
mod change_handler;
pub mod client;
pub mod clock;
mod error;
pub mod events;
pub mod fence;
pub mod lease;
mod metadata;
mod metrics_access;
mod overload;
pub mod page;
pub mod pod_template;
pub mod queue;
mod retry;
mod token_file;
pub mod watch;
mod watch_events;
pub mod write;
pub mod write_cache;

pub use bounded::Bounded;
pub use client::ClientOptions;
pub use clock::Clock;
pub use error::{Error, error_chain};
pub use events::{EventRecorder, EventType};
pub use fence::Fence;
pub use metadata::metadata_client;
pub use metrics_access::ReviewedAccess;
pub use watch::{Change, Key, ObjectView, Store};
pub use watch_events::WatchEvents;

/// A connection to one cluster, cheap to clone.
#[derive(Clone)]
pub struct Cluster {
    /// The client; use `write` for writes, so that they have a deadline and are counted.
    pub client: kube::Client,
    /// The API server's time.
    pub clock: Clock,
    /// Publishes events in the background.
    pub events: EventRecorder,
    watches: Watches,
    client_config: Arc<client::ClientConfig>,
    options: ClientOptions,
}

impl Cluster {
    /// Connects with `options` and starts the event recorder, which ends when the last clone of this is dropped.
    ///
    /// # Errors
    /// When neither the kubeconfig nor the Pod's service account can be read.
    pub async fn connect(options: &ClientOptions) -> Result<Self, Error> {
        let clock = Clock::new();
        let client_config = Arc::new(client::load_client_config(options, clock.clone()).await?);
        Self::build(client_config, clock, options.clone(), Watches::default(), None)
    }

    /// The same cluster, whose stores report to `watches`.
    #[must_use]
    pub fn with_watches(self, watches: &Watches) -> Self {
        let watches = watches.clone();
        Self { watches, ..self }
    }

    /// A store of what `api` and `list_params` select (labels, fields, objects per page), as `project` maps it (`None`
    /// leaves an object out), and the task that keeps it up to date and never ends. An object that cannot be read is
    /// left out, with a warning on it. The process is not ready while the store has no list yet or is stale.
    pub fn reflector<R, T>(
        &self,
        api: Api<R::Kind>,
        list_params: ListParams,
        project: impl Fn(R) -> Option<T> + Send + 'static,
    ) -> (Store<T>, BoxFuture<'static, ()>)
    where
        R: ObjectView + DeserializeOwned + 'static,
        T: PartialEq + Send + Sync + 'static,
    {
        let watch = self.watches.register(&R::Kind::kind(&()));
        watch::new_reflector(api, list_params, Some(self.events.clone()), watch, project)
    }

    /// The same for a kind that may be missing, or the role to read it: the process is not ready while the store is
    /// stale, but does not wait for its first list, nor for a kind that the API server refuses. An object that cannot be
    /// read is left out with only a log line.
    pub fn optional_reflector<R, T>(
        &self,
        api: Api<R::Kind>,
        list_params: ListParams,
        project: impl Fn(R) -> Option<T> + Send + 'static,
    ) -> (Store<T>, BoxFuture<'static, ()>)
    where
        R: ObjectView + DeserializeOwned + 'static,
        T: PartialEq + Send + Sync + 'static,
    {
        let watch = self.watches.register_optional(&R::Kind::kind(&()));
        watch::new_reflector(api, list_params, None, watch, project)
    }

    /// The same for a kind that some of the work does not need: the process is ready once it is listed or refused, and
    /// stays so. An object that cannot be read is left out with only a log line, because the account of the webhooks may
    /// create no events.
    pub fn reflector_for_start<R, T>(
        &self,
        api: Api<R::Kind>,
        list_params: ListParams,
        project: impl Fn(R) -> Option<T> + Send + 'static,
    ) -> (Store<T>, BoxFuture<'static, ()>)
    where
        R: ObjectView + DeserializeOwned + 'static,
        T: PartialEq + Send + Sync + 'static,
    {
        let watch = self.watches.register_for_start(&R::Kind::kind(&()));
        watch::new_reflector(api, list_params, None, watch, project)
    }

    /// The same cluster with its own connections, which carry nothing once `fence` is closed, events included.
    ///
    /// # Errors
    /// When the configuration that [`Cluster::connect`] read cannot be used any more.
    pub fn with_fence(&self, fence: &Fence) -> Result<Self, Error> {
        let (client_config, options) = (Arc::clone(&self.client_config), self.options.clone());
        let (clock, watches) = (self.clock.clone(), self.watches.clone());
        Self::build(client_config, clock, options, watches, Some(fence.clone()))
    }

    fn build(
        client_config: Arc<client::ClientConfig>,
        clock: Clock,
        options: ClientOptions,
        watches: Watches,
        fence: Option<Fence>,
    ) -> Result<Self, Error> {
        let client = client_config.client(fence)?;
        let events = EventRecorder::start(
            client.clone(),
            clock.clone(),
            &options.component,
            options.host.as_deref(),
        );
        Ok(Self {
            client,
            clock,
            events,
            watches,
            client_config,
            options,
        })
    }
}

#[cfg(any(test, feature = "testing"))]
impl Cluster {
    /// A cluster behind `client`.
    #[must_use]
    pub fn from_client(client: kube::Client) -> Self {
        let options = ClientOptions {
            component: "test".to_owned(),
            ..ClientOptions::default()
        };
        let clock = Clock::new();
        Self {
            events: EventRecorder::start(client.clone(), clock.clone(), &options.component, None),
            client_config: Arc::new(client::ClientConfig::for_tests(clock.clone())),
            watches: Watches::default(),
            client,
            clock,
            options,
        }
    }
}
