//! The list and the watches that keep a store up to date.
//!
//! In:  lists in pages, watch events and bookmarks.
//! Out: the store, the watch's status (readiness, metrics), and one log line for each change of it.
//!
//! Own code rather than `kube::runtime::watcher`: that one has no deadline for a list or for the start of a watch,
//! shows no bookmarks, and reports a new attempt as if it were progress.

use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

use futures::StreamExt;
use kube::api::{ListParams, WatchEvent, WatchParams};
use kube::core::{ObjectList, Request};
use kube::{Api, Client, Resource};
use serde_json::value::RawValue;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

use crate::retry::RETRY_BACKOFF;
use crate::{Error, page};
use kruise_ops::metrics::metrics;
use kruise_ops::watches::WatchHandle;

/// Objects per page of a list, unless the caller sets a different number; as client-go.
const DEFAULT_PAGE_SIZE: u32 = 500;
/// Timeout of one page of a list, or of the start of a watch; the API server's own limit for requests.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(60);
/// How long a watch may be silent: the API server sends a bookmark about every minute. One that has never had an event
/// of the kind sends none, so silence is not a failure.
const WATCH_IDLE_TIMEOUT: Duration = Duration::from_secs(150);
/// How much longer pages may become; what is too long for our memory is requested in shorter ones.
const MAX_PAGE_FACTOR: u32 = 256;
/// A watch that ends earlier than this, without an event, has failed; as in client-go.
const MIN_WATCH_DURATION: Duration = Duration::from_secs(1);

/// Receives the objects of a list and its watches, as the API server sends them. One [`Reflector`] serves all kinds.
pub(super) trait ObjectSink: Send {
    /// A list begins.
    fn begin_list(&mut self);
    /// The list in progress contains this object.
    fn add_listed(&mut self, text: &RawValue) -> serde_json::Result<()>;
    /// The list is complete: objects that were not in it are deleted.
    fn end_list(&mut self);
    /// An object was added or changed; returns its version.
    fn upsert(&mut self, text: &RawValue) -> serde_json::Result<Option<String>>;
    /// An object was deleted; returns its version.
    fn remove(&mut self, text: &RawValue) -> serde_json::Result<Option<String>>;
    /// Size of all stored objects as the API server sent them.
    fn bytes(&self) -> usize;
}

/// Keeps one store up to date.
pub(super) struct Reflector {
    client: Client,
    path: String,
    list_params: ListParams,
    sink: Box<dyn ObjectSink>,
    synced: watch::Sender<bool>,
    status: WatchStatus,
    /// Version of the store's content; `None` means that a list is needed.
    resource_version: Option<String>,
    /// How many times as long the pages of the next list are: they expired before the end of the last one.
    page_factor: u32,
}

impl Reflector {
    pub fn new<K: Resource<DynamicType = ()>>(
        api: Api<K>,
        list_params: ListParams,
        sink: Box<dyn ObjectSink>,
        synced: watch::Sender<bool>,
        watch: WatchHandle,
    ) -> Self {
        let limit = Some(list_params.limit.unwrap_or(DEFAULT_PAGE_SIZE));
        Self {
            path: api.resource_url().to_owned(),
            client: api.into_client(),
            list_params: ListParams { limit, ..list_params },
            sink,
            synced,
            status: WatchStatus::new(K::kind(&()).into_owned(), watch),
            resource_version: None,
            page_factor: 1,
        }
    }

    /// Lists, and watches from there; never returns.
    pub async fn run(mut self) {
        loop {
            let result = match self.resource_version.clone() {
                None => self.list().await,
                Some(version) => self.watch(&version).await,
            };
            if let Err(error) = result {
                if error.expired() {
                    self.resource_version = None;
                }
                sleep(self.status.record_failure(&error)).await;
            }
        }
    }

    async fn list(&mut self) -> Result<(), Error> {
        let mut params = self.list_params.clone();
        let full_limit = params.limit.map(|limit| limit.saturating_mul(self.page_factor));
        params.limit = full_limit;
        let failures_before = self.status.failures;
        self.sink.begin_list();
        loop {
            let list = match self.fetch_page(&mut params).await {
                Ok(list) => list,
                // The pages fetched so far remain valid for some minutes.
                Err(error) if params.continue_token.is_some() && error.retryable() => {
                    sleep(self.status.record_failure(&error)).await;
                    continue;
                }
                Err(error) => {
                    if params.continue_token.is_some() && error.expired() {
                        self.page_factor = self.page_factor.saturating_mul(4).min(MAX_PAGE_FACTOR);
                    }
                    return Err(error);
                }
            };
            self.status.failures = failures_before;
            let bytes = list.items.iter().map(|text| text.get().len()).sum();
            page::raise_limit(&mut params, full_limit, bytes);
            for text in list.items {
                // One by one: a page of many small values takes a hundred times its length when it is parsed.
                self.sink.add_listed(&text).map_err(kube::Error::SerdeError)?;
            }
            let more = list.metadata.continue_.filter(|token| !token.is_empty());
            if more.is_none() {
                self.resource_version = list.metadata.resource_version.filter(|v| !v.is_empty());
                break;
            }
            params.continue_token = more;
        }
        if self.resource_version.is_none() {
            return Err(Error::Transport("the list has no resourceVersion".to_owned()));
        }
        self.page_factor = 1;
        self.sink.end_list();
        self.status.record_list();
        self.status.record_stored_bytes(self.sink.bytes());
        self.synced.send_replace(true);
        Ok(())
    }

    /// The next page, its objects not yet parsed; with fewer objects if the page is too large for our memory.
    async fn fetch_page(&mut self, params: &mut ListParams) -> Result<ObjectList<Box<RawValue>>, Error> {
        let (client, kind) = (&self.client, &self.status.kind);
        page::fetch_fitting(client, &self.path, Request::list, params, kind, REQUEST_TIMEOUT).await
    }

    /// Applies events until the API server ends the watch, or it is silent for too long.
    async fn watch(&mut self, resource_version: &str) -> Result<(), Error> {
        let params = WatchParams {
            label_selector: self.list_params.label_selector.clone(),
            field_selector: self.list_params.field_selector.clone(),
            timeout: Some(watch_timeout_seconds(&RandomState::new())),
            ..WatchParams::default()
        };
        let request = Request::new(&self.path).watch(&params, resource_version);
        let request = request.map_err(kube::Error::BuildRequest)?;
        let start = self.client.request_events::<Box<RawValue>>(request);
        let mut events = Box::pin(with_timeout("watch", &self.status.kind, start).await?);
        let mut established = false;
        loop {
            let idle_timeout = if established {
                WATCH_IDLE_TIMEOUT
            } else {
                MIN_WATCH_DURATION
            };
            let Ok(event) = timeout(idle_timeout, events.next()).await else {
                if !established {
                    established = true;
                    self.status.record_watch_established();
                    continue;
                }
                tracing::debug!(kind = self.status.kind, after = ?WATCH_IDLE_TIMEOUT, "watch is silent; starting another");
                return Ok(());
            };
            let Some(event) = event else { break };
            self.apply(event.map_err(Error::from)?)?;
            established = true;
            self.status.record_event();
            self.status.record_stored_bytes(self.sink.bytes());
        }
        if established {
            return Ok(());
        }
        Err(Error::Transport(
            "the watch ended as soon as it had started".to_owned(),
        ))
    }

    fn apply(&mut self, event: WatchEvent<Box<RawValue>>) -> Result<(), Error> {
        let version = match event {
            WatchEvent::Added(text) | WatchEvent::Modified(text) => self.sink.upsert(&text),
            WatchEvent::Deleted(text) => self.sink.remove(&text),
            WatchEvent::Bookmark(bookmark) => Ok(Some(bookmark.metadata.resource_version)),
            WatchEvent::Error(status) => return Err(Error::Api(status)),
        };
        let version = version.map_err(kube::Error::SerdeError)?;
        if let Some(version) = version.filter(|v| !v.is_empty()) {
            self.resource_version = Some(version);
        }
        Ok(())
    }
}

/// A response of the API server, with a timeout.
async fn with_timeout<T>(
    verb: &'static str,
    kind: &str,
    answer: impl Future<Output = Result<T, kube::Error>>,
) -> Result<T, Error> {
    match timeout(REQUEST_TIMEOUT, answer).await {
        Ok(answer) => answer.map_err(Error::from),
        Err(_) => Err(Error::Timeout {
            verb,
            kind: kind.to_owned(),
            after: REQUEST_TIMEOUT,
        }),
    }
}

/// Status of the watch: for readiness, metrics, the log, and the pause after a failure.
struct WatchStatus {
    kind: String,
    watch: WatchHandle,
    /// Failures since the last event or bookmark.
    failures: u32,
    /// Whether the last of them was an expired resourceVersion.
    expired: bool,
    /// The error that was logged last, if the watch still fails.
    logged_error: Option<String>,
}

impl WatchStatus {
    fn new(kind: String, watch: WatchHandle) -> Self {
        Self {
            kind,
            watch,
            failures: 0,
            expired: false,
            logged_error: None,
        }
    }

    /// A list is complete.
    fn record_list(&self) {
        self.watch.record_contact();
        self.watch.mark_listed();
    }

    /// Sets the size of the stored objects.
    fn record_stored_bytes(&self, bytes: usize) {
        self.watch.set_stored_bytes(bytes);
    }

    /// The watch works.
    fn record_watch_established(&mut self) {
        self.watch.record_contact();
        if self.logged_error.take().is_some() {
            tracing::info!(kind = self.kind, "watch works again");
        }
    }

    /// An event or a bookmark: only these show that an earlier failure is over.
    fn record_event(&mut self) {
        self.record_watch_established();
        self.failures = 0;
        self.expired = false;
    }

    /// Records a failure; returns how long to wait.
    fn record_failure(&mut self, error: &Error) -> Duration {
        let labels = [("kind", self.kind.clone())];
        metrics().watch_errors.get_or_create(&labels).inc();
        // An API server that reports an expired version is back: the relist does not wait as for an unavailable one.
        let first_expiry = error.expired() && !self.expired;
        self.expired = error.expired();
        if first_expiry {
            self.failures = 0;
        }
        let delay = retry_delay(self.failures, error.retry_after(), &RandomState::new());
        self.failures = self.failures.saturating_add(1);
        let why = error.to_string();
        self.watch
            .record_failure(&why, error.forbidden() || error.not_found());
        let kind = &self.kind;
        if first_expiry {
            tracing::debug!(kind, why, retry_in = ?delay, "listing again after a gap in the watch");
        } else if self.logged_error.as_ref() == Some(&why) {
            tracing::debug!(kind, error = why, retry_in = ?delay, "watch still fails");
        } else {
            tracing::warn!(kind, error = why, retry_in = ?delay, "watch failed; repeats are logged at debug");
            self.logged_error = Some(why);
        }
        delay
    }
}

/// Maximum duration of a watch, 200 to 290 s: those that began together, at the restart of an API server, do not end
/// together. kube allows less than 295 s.
fn watch_timeout_seconds(random: &RandomState) -> u32 {
    200 + u32::try_from(random.hash_one(()) % 91).unwrap_or_default()
}

/// The pause after that many earlier failures: doubled with each and spread over half to one and a half of that, so
/// that many clients do not return at once; never shorter than what the API server requests.
fn retry_delay(failures: u32, retry_after: Option<Duration>, random: &RandomState) -> Duration {
    let doubled = RETRY_BACKOFF.delay(failures);
    let requested = retry_after.unwrap_or_default();
    let per_mille = u32::try_from(random.hash_one(failures) % 1000).unwrap_or_default();
    if requested > doubled {
        return requested + requested / 2 * per_mille / 1000;
    }
    (doubled / 2 + doubled * per_mille / 1000).max(requested)
}

#[cfg(test)]
mod tests;
