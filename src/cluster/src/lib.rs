//! Kubernetes plumbing: the only place that knows how to talk to an API server.
//!
//! In:  a kubeconfig or the service account of the Pod.
//! Out: a client whose calls have deadlines and metrics, mirrors of watched kinds, the API server's
//!      clock, and an event recorder that never blocks its caller.

use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use kube::api::ListParams;
use kube::{Api, Resource};
use serde::de::DeserializeOwned;
use tokio::time::Instant;

use kruise_ops::Watches;

mod bounded;
mod busy;
pub mod client;
pub mod clock;
mod error;
pub mod events;
pub mod fence;
mod intake;
pub mod lease;
mod metadata;
mod page;
pub mod pod_template;
pub mod queue;
pub mod watch;
pub mod write;
pub mod write_cache;

pub use bounded::Bounded;
pub use client::Options;
pub use clock::Clock;
pub use error::{Error, chain};
pub use events::{EventType, Events};
pub use fence::Fence;
pub use intake::Intake;
pub use metadata::metadata_client;
pub use watch::{Change, Form, Key, Mirror};

/// A connection to one cluster, cheap to clone.
#[derive(Clone)]
pub struct Cluster {
    /// The client; use `write` for writes, so that they have a deadline and are counted.
    pub client: kube::Client,
    /// The API server's time.
    pub clock: Clock,
    /// Publishes events in the background.
    pub events: Events,
    watches: Watches,
    source: Arc<client::Source>,
    options: Options,
}

impl Cluster {
    /// Connects with `options` and starts the event recorder, which ends when the last clone of this is gone.
    ///
    /// # Errors
    /// When neither the kubeconfig nor the Pod's service account can be read.
    pub async fn connect(options: &Options) -> Result<Self, Error> {
        let clock = Clock::new();
        let source = Arc::new(client::source(options, clock.clone()).await?);
        Self::from(source, clock, options.clone(), Watches::default(), None)
    }

    /// The same, whose mirrors report to `watches`.
    #[must_use]
    pub fn reporting_to(self, watches: &Watches) -> Self {
        let watches = watches.clone();
        Self { watches, ..self }
    }

    /// A mirror of what `api` and `selected` select (labels, fields, objects per page), as `project` sees it (`None`
    /// leaves an object out), and the task that keeps it up to date and never ends. An object that cannot be read is left
    /// out, with a warning on it. The process is not ready while the mirror has no list yet or is stale.
    pub fn mirror<R, T>(
        &self,
        api: Api<R::Kind>,
        selected: ListParams,
        project: impl Fn(R) -> Option<T> + Send + 'static,
    ) -> (Mirror<T>, BoxFuture<'static, ()>)
    where
        R: Form + DeserializeOwned + 'static,
        T: PartialEq + Send + Sync + 'static,
    {
        let watch = self.watches.begin(&R::Kind::kind(&()));
        watch::mirror(api, selected, Some(self.events.clone()), Some(watch), project)
    }

    /// The same cluster by connections of its own, which carry nothing once `fence` is closed, events included.
    ///
    /// # Errors
    /// When what [`Cluster::connect`] read cannot be used any more.
    pub fn behind(&self, fence: &Fence) -> Result<Self, Error> {
        let (source, options) = (Arc::clone(&self.source), self.options.clone());
        let (clock, watches) = (self.clock.clone(), self.watches.clone());
        Self::from(source, clock, options, watches, Some(fence.clone()))
    }

    fn from(
        source: Arc<client::Source>,
        clock: Clock,
        options: Options,
        watches: Watches,
        fence: Option<Fence>,
    ) -> Result<Self, Error> {
        let client = source.client(fence)?;
        let events = Events::start(
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
            source,
            options,
        })
    }
}

#[cfg(any(test, feature = "testing"))]
impl Cluster {
    /// A cluster that `client` speaks to.
    #[must_use]
    pub fn of(client: kube::Client) -> Self {
        let options = Options {
            component: "test".to_owned(),
            ..Options::default()
        };
        let clock = Clock::new();
        Self {
            events: Events::start(client.clone(), clock.clone(), &options.component, None),
            source: Arc::new(client::Source::unused(clock.clone())),
            watches: Watches::default(),
            client,
            clock,
            options,
        }
    }
}

/// A mirror that the process can do without: what becomes of it changes no readiness, and an object that cannot be read
/// is left out with a line in the log alone.
pub fn optional_mirror<R, T>(
    api: Api<R::Kind>,
    selected: ListParams,
    project: impl Fn(R) -> Option<T> + Send + 'static,
) -> (Mirror<T>, BoxFuture<'static, ()>)
where
    R: Form + DeserializeOwned + 'static,
    T: PartialEq + Send + Sync + 'static,
{
    watch::mirror(api, selected, None, None, project)
}

/// That much later; in ten years where the clock does not go so far.
fn later(from: Instant, by: Duration) -> Instant {
    const FAR: Duration = Duration::from_secs(10 * 365 * 24 * 3600);
    from.checked_add(by.min(FAR)).unwrap_or(from)
}
