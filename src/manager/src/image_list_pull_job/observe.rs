//! Index of ImageListPullJobs, and of the ImagePullJobs that they control.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::mpsc::UnboundedReceiver;

use super::plan::{Observed, owner};
use kruise_api::image_list_pull_job::{ImageListPullJob, list_of};
use kruise_api::image_pull_job::ImagePullJob;
use kruise_cluster::write_cache::{Versioned, WriteCache};
use kruise_cluster::{Change, Key, WatchEvents};

/// Name in logs and metrics.
pub const NAME: &str = "imagelistpulljob";

/// All observed objects.
#[derive(Default)]
pub struct Index {
    /// ImageListPullJobs, in one group.
    pub lists: WriteCache<ImageListPullJob>,
    /// ImagePullJobs with such a controller, by its group key.
    pub jobs: WriteCache<ImagePullJob>,
}

/// The cache entry of an ImageListPullJob.
pub fn versioned_list(list: Arc<ImageListPullJob>) -> Versioned<ImageListPullJob> {
    Versioned::from_object(list, String::new())
}

/// The cache entry of an ImagePullJob; `None` if no ImageListPullJob controls it.
pub fn versioned_job(job: Arc<ImagePullJob>) -> Option<Versioned<ImagePullJob>> {
    let group = list_of(&job)?.group_key(job.metadata.namespace.as_deref());
    Some(Versioned::from_object(job, group))
}

fn group_of(list: &ImageListPullJob) -> String {
    owner(list).group_key(list.metadata.namespace.as_deref())
}

impl Index {
    /// The job of that key with its ImagePullJobs, and the time until an unconfirmed write must be read.
    pub fn observe(&self, key: &Key, now: Instant) -> Option<(Observed, Option<Duration>)> {
        let list = Arc::clone(self.lists.get(key)?);
        let group = group_of(&list);
        let (mut jobs, mut terminating) = (Vec::new(), BTreeSet::new());
        for (key, job, is_terminating) in self.jobs.group_entries(&group) {
            if is_terminating {
                terminating.insert(key.name.clone());
            } else {
                jobs.push(Arc::clone(job));
            }
        }
        let next_fetch = [
            self.jobs.unconfirmed(&group, now).1,
            self.lists.confirm_time_left(key, now),
        ];
        let observed = Observed {
            list,
            jobs,
            terminating,
        };
        Some((observed, next_fetch.into_iter().flatten().min()))
    }

    /// Whether the job of that key must be read, and which of its ImagePullJobs.
    pub fn unconfirmed(&self, key: &Key, now: Instant) -> (bool, Vec<Key>) {
        let group = self.lists.get(key).map(|list| group_of(list));
        let jobs = group.map(|group| self.jobs.unconfirmed(&group, now).0);
        (self.lists.must_be_read(key, now), jobs.unwrap_or_default())
    }

    /// Applies one change; returns the affected jobs.
    pub fn apply(&mut self, event: &WatchEvent) -> Vec<Key> {
        match event {
            WatchEvent::List(Change { key, old, new }) => {
                match (old, new) {
                    (_, Some(new)) => self.lists.apply_watch(key, versioned_list(Arc::clone(new))),
                    (Some(old), None) => {
                        let uid = old.metadata.uid.as_deref().unwrap_or_default();
                        self.lists.apply_watch_delete(key, uid);
                    }
                    (None, None) => {}
                }
                vec![key.clone()]
            }
            WatchEvent::Job(Change { key, old, new }) => {
                let entry = new.clone().and_then(versioned_job);
                let uid = |job: &ImagePullJob| job.metadata.uid.clone().unwrap_or_default();
                match (entry, old) {
                    (Some(entry), _) => self.jobs.apply_watch(key, entry),
                    (None, Some(old)) => self.jobs.apply_watch_delete(key, &uid(old)),
                    (None, None) => {}
                }
                let owners = [old, new].into_iter().flatten().filter_map(|job| list_of(job));
                let lists = owners.map(|owner| Key {
                    namespace: key.namespace.clone(),
                    name: owner.name,
                });
                lists.collect()
            }
        }
    }
}

/// A change of one object.
pub enum WatchEvent {
    List(Change<ImageListPullJob>),
    Job(Change<ImagePullJob>),
}

impl std::fmt::Display for WatchEvent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::List(change) => write!(f, "ImageListPullJob {}", change.key),
            Self::Job(change) => write!(f, "ImagePullJob {}", change.key),
        }
    }
}

/// All existing objects, and every change from now on; ImagePullJobs come first, so that none is created twice.
pub fn watch_events(
    jobs: UnboundedReceiver<Change<ImagePullJob>>,
    lists: UnboundedReceiver<Change<ImageListPullJob>>,
) -> WatchEvents<WatchEvent> {
    WatchEvents::new(NAME)
        .with(jobs, WatchEvent::Job)
        .with(lists, WatchEvent::List)
}
