//! The list and the watches that keep a mirror up to date.
//!
//! In:  lists in pages, watch events and bookmarks.
//! Out: the mirror, how the watch is (readiness, metrics), and one log line for each change of that.
//!
//! Own code rather than `kube::runtime::watcher`: that one has no deadline for a list or for the start of a watch, shows
//! no bookmarks, and reports a new attempt as if it were progress.

use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

use futures::StreamExt;
use kube::api::{ListParams, WatchEvent, WatchParams};
use kube::core::{ObjectList, Request};
use kube::{Api, Client, Resource};
use serde_json::value::RawValue;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

use super::Store;
use crate::{Error, page};
use kruise_api::backoff::Backoff;
use kruise_ops::metrics::metrics;
use kruise_ops::watches::Watch;

/// Objects per page of a list, where the caller says nothing else; as client-go.
const PAGE: u32 = 500;
/// How long one page of a list, or the start of a watch, may take; the API server's own limit for requests.
const ANSWER: Duration = Duration::from_secs(60);
/// How long a watch may be silent: the API server sends a bookmark about every minute. One that has never seen an event
/// of the kind sends none, hence to be silent is no failure.
const SILENCE: Duration = Duration::from_secs(150);
/// A watch that ends earlier than this, without an event, has failed; as in client-go.
const SHORT: Duration = Duration::from_secs(1);
/// After failures, unless the API server asks for a longer pause.
const RETRY: Backoff = Backoff::new(Duration::from_millis(200), Duration::from_secs(30));
/// Longest pause that the API server may ask for.
const LONGEST_ASKED: Duration = Duration::from_secs(300);

/// Keeps one mirror up to date.
pub(super) struct Follower {
    client: Client,
    path: String,
    selected: ListParams,
    store: Box<dyn Store>,
    synced: watch::Sender<bool>,
    report: Report,
    /// What the mirror holds; `None` is to be listed.
    version: Option<String>,
}

impl Follower {
    pub fn new<K: Resource<DynamicType = ()>>(
        api: Api<K>,
        selected: ListParams,
        store: Box<dyn Store>,
        synced: watch::Sender<bool>,
        watch: Option<Watch>,
    ) -> Self {
        let limit = Some(selected.limit.unwrap_or(PAGE));
        Self {
            path: api.resource_url().to_owned(),
            client: api.into_client(),
            selected: ListParams { limit, ..selected },
            store,
            synced,
            report: Report::new(K::kind(&()).into_owned(), watch),
            version: None,
        }
    }

    /// Lists, and watches from there; for ever.
    pub async fn run(mut self) {
        loop {
            let done = match self.version.clone() {
                None => self.list().await,
                Some(version) => self.watch(&version).await,
            };
            if let Err(error) = done {
                if error.expired() {
                    self.version = None;
                }
                sleep(self.report.failed(&error)).await;
            }
        }
    }

    async fn list(&mut self) -> Result<(), Error> {
        let mut page = self.selected.clone();
        let before = self.report.failures;
        self.store.begin_list();
        loop {
            let list = match self.page(&mut page).await {
                Ok(list) => list,
                // The pages that are there are good for some minutes yet.
                Err(error) if page.continue_token.is_some() && error.retryable() => {
                    sleep(self.report.failed(&error)).await;
                    continue;
                }
                Err(error) => return Err(error),
            };
            self.report.failures = before;
            for text in list.items {
                // One after the other: a page of many small values takes a hundred times its length when it is parsed.
                self.store.listed(&text).map_err(kube::Error::SerdeError)?;
            }
            let more = list.metadata.continue_.filter(|token| !token.is_empty());
            if more.is_none() {
                self.version = list.metadata.resource_version.filter(|v| !v.is_empty());
                break;
            }
            page.continue_token = more;
        }
        if self.version.is_none() {
            return Err(Error::Transport("the list has no resourceVersion".to_owned()));
        }
        self.store.end_list();
        self.report.listed();
        self.report.holds(self.store.bytes());
        self.synced.send_replace(true);
        Ok(())
    }

    /// The next page, its objects unread, with fewer of them where it is too large for our memory.
    async fn page(&mut self, page: &mut ListParams) -> Result<ObjectList<Box<RawValue>>, Error> {
        loop {
            let answer = page::read(&self.client, &self.path, page);
            if let Some(list) = within("list", &self.report.kind, answer).await? {
                return Ok(list);
            }
            page::shrink(page);
            tracing::debug!(kind = self.report.kind, limit = page.limit, "page is too large");
        }
    }

    /// Applies events until the API server ends the watch, or nothing is heard of it.
    async fn watch(&mut self, from: &str) -> Result<(), Error> {
        let params = WatchParams {
            label_selector: self.selected.label_selector.clone(),
            field_selector: self.selected.field_selector.clone(),
            ..WatchParams::default()
        };
        let request = Request::new(&self.path).watch(&params, from);
        let request = request.map_err(kube::Error::BuildRequest)?;
        let start = self.client.request_events::<Box<RawValue>>(request);
        let mut events = Box::pin(within("watch", &self.report.kind, start).await?);
        let mut lives = false;
        loop {
            let patience = if lives { SILENCE } else { SHORT };
            let Ok(event) = timeout(patience, events.next()).await else {
                if !lives {
                    lives = true;
                    self.report.watching();
                    continue;
                }
                tracing::debug!(kind = self.report.kind, after = ?SILENCE, "watch is silent; starting another");
                return Ok(());
            };
            let Some(event) = event else { break };
            self.apply(event.map_err(Error::from)?)?;
            lives = true;
            self.report.progress();
            self.report.holds(self.store.bytes());
        }
        if lives {
            return Ok(());
        }
        Err(Error::Transport(
            "the watch ended as soon as it had started".to_owned(),
        ))
    }

    fn apply(&mut self, event: WatchEvent<Box<RawValue>>) -> Result<(), Error> {
        let version = match event {
            WatchEvent::Added(text) | WatchEvent::Modified(text) => self.store.put(&text),
            WatchEvent::Deleted(text) => self.store.remove(&text),
            WatchEvent::Bookmark(bookmark) => Ok(Some(bookmark.metadata.resource_version)),
            WatchEvent::Error(status) => return Err(Error::Api(status)),
        };
        let version = version.map_err(kube::Error::SerdeError)?;
        if let Some(version) = version.filter(|v| !v.is_empty()) {
            self.version = Some(version);
        }
        Ok(())
    }
}

/// An answer of the API server, within its time.
async fn within<T>(
    verb: &'static str,
    kind: &str,
    answer: impl Future<Output = Result<T, kube::Error>>,
) -> Result<T, Error> {
    match timeout(ANSWER, answer).await {
        Ok(answer) => answer.map_err(Error::from),
        Err(_) => Err(Error::Timeout {
            verb,
            kind: kind.to_owned(),
            after: ANSWER,
        }),
    }
}

/// How it goes: for readiness, metrics, the log, and the pause after a failure.
struct Report {
    kind: String,
    watch: Option<Watch>,
    /// Failures since the last event or bookmark.
    failures: u32,
    /// Whether the last of them was a resourceVersion that the API server has forgotten.
    expired: bool,
    /// What the log says of it now.
    logged: Option<String>,
}

impl Report {
    fn new(kind: String, watch: Option<Watch>) -> Self {
        Self {
            kind,
            watch,
            failures: 0,
            expired: false,
            logged: None,
        }
    }

    fn heard(&self) {
        if let Some(watch) = &self.watch {
            watch.heard();
        }
    }

    /// A list is complete.
    fn listed(&self) {
        self.heard();
        if let Some(watch) = &self.watch {
            watch.listed();
        }
    }

    /// The length of what is held.
    fn holds(&self, bytes: usize) {
        if let Some(watch) = &self.watch {
            watch.holds(bytes);
        }
    }

    /// A watch works.
    fn watching(&mut self) {
        self.heard();
        if self.logged.take().is_some() {
            tracing::info!(kind = self.kind, "watch works again");
        }
    }

    /// An event or a bookmark: only these show that what failed before is over.
    fn progress(&mut self) {
        self.watching();
        self.failures = 0;
        self.expired = false;
    }

    /// Records a failure; how long to wait.
    fn failed(&mut self, error: &Error) -> Duration {
        let labels = [("kind", self.kind.clone())];
        metrics().watch_errors.get_or_create(&labels).inc();
        // An API server that has forgotten so much is back: the list does not wait as for one that is away.
        let back = error.expired() && !self.expired;
        self.expired = error.expired();
        if back {
            self.failures = 0;
        }
        let pause = pause(self.failures, error.retry_after(), &RandomState::new());
        self.failures = self.failures.saturating_add(1);
        let why = error.to_string();
        if let Some(watch) = &self.watch {
            watch.failed(&why);
        }
        let kind = &self.kind;
        if back {
            tracing::debug!(kind, why, retry_in = ?pause, "listing again after a gap in the watch");
        } else if self.logged.as_ref() == Some(&why) {
            tracing::debug!(kind, error = why, retry_in = ?pause, "watch still fails");
        } else {
            tracing::warn!(kind, error = why, retry_in = ?pause, "watch failed; repeats are logged at debug");
            self.logged = Some(why);
        }
        pause
    }
}

/// The pause after so many failures before this one: doubled with each and spread over half to one and a half of that,
/// so that many clients do not come back at once; never shorter than what the API server asks for.
fn pause(failures: u32, asked: Option<Duration>, chance: &RandomState) -> Duration {
    let doubled = RETRY.pause(failures);
    let asked = asked.unwrap_or_default().min(LONGEST_ASKED);
    let per_mille = u32::try_from(chance.hash_one(failures) % 1000).unwrap_or_default();
    if asked > doubled {
        return asked + asked / 2 * per_mille / 1000;
    }
    (doubled / 2 + doubled * per_mille / 1000).max(asked)
}

#[cfg(test)]
mod tests;
