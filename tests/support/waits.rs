//! Waits for events, and error messages on timeout: what was waited for, what was seen last, and the last lines of our
//! programs' logs.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use futures::{Stream, StreamExt};
use kube::api::Api;
use kube::runtime::watcher;
use kube::{Resource, ResourceExt};
use serde::Serialize;
use serde::de::DeserializeOwned;

pub use testbed::wait::WAIT_TIMEOUT;

/// Polls until there is a result, for what no watch shows.
pub async fn poll_until<T, F: Future<Output = Option<T>>>(
    what: &str,
    logs: &dyn Fn() -> String,
    poll: impl Fn() -> F,
) -> T {
    let start = Instant::now();
    loop {
        if let Some(value) = poll().await {
            return value;
        }
        let in_time = start.elapsed() < WAIT_TIMEOUT;
        assert!(in_time, "{what}: not there after {WAIT_TIMEOUT:?}\n{}", logs());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Waits until lines of level INFO of a log begin with this text and name the object; returns their number.
pub async fn wait_for_log(log: &Path, message: &str, object: &str) -> usize {
    let count = || {
        let text = std::fs::read_to_string(log).unwrap();
        let pattern = format!(": {message}");
        let matches =
            |line: &&str| line.contains(" INFO ") && line.contains(&pattern) && line.contains(object);
        text.lines().filter(matches).count()
    };
    let what = format!("{message:?} of {object:?} in the log");
    let poll = async || Some(count()).filter(|lines| *lines > 0);
    poll_until(&what, &|| log_tails([log.to_owned()]), poll).await
}

/// The events of a watch. If it fails, because the API server is down or the objects' CRD was written, it is restarted
/// after a moment.
pub fn watch_events<K>(api: Api<K>, config: watcher::Config) -> impl Stream<Item = watcher::Event<K>>
where
    K: Resource + Clone + Debug + DeserializeOwned + Send + 'static,
{
    watcher(api, config).filter_map(async |event| {
        if event.is_err() {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        event.ok()
    })
}

/// Follows objects, converted by `convert`, until `predicate` holds for all of them together, in the order of their
/// names; it is called for every observed state.
pub async fn watch_until<K, T>(
    what: &str,
    logs: &dyn Fn() -> String,
    api: Api<K>,
    config: watcher::Config,
    convert: impl Fn(K) -> T,
    mut predicate: impl FnMut(&[&T]) -> bool,
) -> Vec<T>
where
    K: Resource + Clone + Debug + DeserializeOwned + Send + 'static,
    T: Serialize,
{
    let mut objects: BTreeMap<String, T> = BTreeMap::new();
    let predicate_holds = async {
        let mut listed = false;
        let mut events = std::pin::pin!(watch_events(api, config));
        while let Some(event) = events.next().await {
            match event {
                // The initial list, or the relist after a watch has ended.
                watcher::Event::Init => {
                    listed = false;
                    objects.clear();
                }
                watcher::Event::Apply(object) | watcher::Event::InitApply(object) => {
                    drop(objects.insert(object.name_any(), convert(object)));
                }
                watcher::Event::Delete(object) => drop(objects.remove(&object.name_any())),
                watcher::Event::InitDone => listed = true,
            }
            if listed && predicate(&objects.values().collect::<Vec<_>>()) {
                return;
            }
        }
    };
    let result = tokio::time::timeout(WAIT_TIMEOUT, predicate_holds).await;
    let last: Vec<T> = objects.into_values().collect();
    assert!(
        result.is_ok(),
        "{what}: not so after {WAIT_TIMEOUT:?}; last seen: {}\n{}",
        serde_json::to_string(&last).unwrap(),
        logs()
    );
    last
}

/// The watch of one object.
pub fn by_name(name: &str) -> watcher::Config {
    watcher::Config::default().fields(&format!("metadata.name={name}"))
}

/// The last lines of those of the files that exist.
pub fn log_tails(files: impl IntoIterator<Item = PathBuf>) -> String {
    let tail = |file: PathBuf| {
        let text = std::fs::read_to_string(&file).ok()?;
        let lines: Vec<&str> = text.lines().collect();
        let last = lines[lines.len().saturating_sub(20)..].join("\n");
        Some(format!("==> end of {}\n{last}\n", file.display()))
    };
    files.into_iter().filter_map(tail).collect()
}
