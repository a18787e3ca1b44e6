//! Images that kubelet's garbage collection leaves alone for as long as a job says.
//!
//! In:  the pins that the NodeImage asks for, images that were pulled.
//! Out: pins in the runtime, metric `pinned_images`, notes on what could not be pinned.
//!
//! The runtime stores each pin with its end, so that a later daemon ends it.

use std::collections::BTreeMap;
use std::future::pending;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use tokio::sync::Notify;
use tokio::time::{sleep, timeout};

use super::plan::{AttemptResult, PullSpec, TagKey};
use crate::Context;
use kruise_cluster::clock::{Clock, duration_until};
use kruise_cri::{Error, Runtime, Runtimes};
use kruise_ops::metrics::metrics;
use kruise_ops::panics::catch_panic;

/// From one look at the pins to the next, at most: the clock may be corrected meanwhile, and a pin whose caller has gone
/// may be stored late.
const MAX_SLEEP: Duration = Duration::from_secs(3600);
/// Pause after the runtime could not be asked.
const RETRY_PAUSE: Duration = Duration::from_secs(300);
/// Pause before the API server's time is looked for again.
const CLOCK_RETRY_PAUSE: Duration = Duration::from_secs(10);
/// How long the runtime has to store a pin, and to report it.
pub(super) const PIN_TIMEOUT: Duration = Duration::from_secs(5);
/// The pauses between questions about it; there is no event.
const PIN_INTERVAL: Duration = Duration::from_millis(200);

/// The pins that jobs ask for now.
#[derive(Debug)]
pub(super) struct PinRequests {
    /// The longest pin of this node; zero if there is none.
    max_duration: SignedDuration,
    durations: Mutex<BTreeMap<TagKey, SignedDuration>>,
    /// References of images that were pulled before a job asked for their pin.
    late: Mutex<BTreeMap<TagKey, String>>,
    /// An image was pinned, or is to be.
    added: Notify,
}

/// Why an image is not pinned.
struct PinFailure {
    why: String,
    /// Whether it may be pinned later.
    retryable: bool,
}

impl From<Error> for PinFailure {
    /// Only a runtime that has gone may pin it later: an image that was removed meanwhile does not return by itself.
    fn from(error: Error) -> Self {
        Self {
            why: error.to_string(),
            retryable: matches!(error, Error::Unreachable { .. } | Error::Timeout { .. }),
        }
    }
}

impl PinFailure {
    /// The time was over, and the runtime had answered that the image is not pinned, or nothing.
    fn timed_out(is_unpinned: bool) -> Self {
        let why = if is_unpinned {
            "the runtime does not report it as pinned"
        } else {
            "the runtime did not answer in time"
        };
        Self {
            why: why.to_owned(),
            retryable: !is_unpinned,
        }
    }
}

/// Has the pins looked at when it is dropped, as the pull may be cancelled.
struct NotifyOnDrop<'a>(&'a Notify);

impl Drop for NotifyOnDrop<'_> {
    fn drop(&mut self) {
        self.0.notify_one();
    }
}

impl PinRequests {
    pub(super) fn new(max_pin_seconds: u32) -> Self {
        Self {
            max_duration: SignedDuration::from_secs(i64::from(max_pin_seconds)),
            durations: Mutex::default(),
            late: Mutex::default(),
            added: Notify::new(),
        }
    }

    /// Takes over a new spec. It counts at the end of a pull, because a job may join one that runs.
    pub(super) fn sync(&self, specs: &BTreeMap<TagKey, PullSpec>) {
        let durations = specs
            .iter()
            .filter_map(|(key, spec)| Some((key.clone(), spec.pin?)));
        *self.lock() = durations.collect();
    }

    /// Pins an image that was pulled, if a job asks for it. An image that could not be pinned is there nevertheless.
    pub(super) async fn after_pull(
        &self,
        mut result: AttemptResult,
        key: &TagKey,
        image: &str,
        runtimes: &Runtimes,
        clock: &Clock,
    ) -> AttemptResult {
        let AttemptResult::Pulled { note, .. } = &mut result else {
            return result;
        };
        let Some(duration) = self.lock().get(key).copied() else {
            return result;
        };
        let _notify = NotifyOnDrop(&self.added);
        if let Err(PinFailure { why, .. }) = self.pin(duration, image, runtimes, clock).await {
            let why = format!("the image is not pinned: {why}");
            *note = Some(note.take().map_or(why.clone(), |note| format!("{note}; {why}")));
        }
        result
    }

    /// Has an image pinned that was pulled before a job asked for it.
    pub(super) fn add_late(&self, key: TagKey, image: String) {
        self.late().insert(key, image);
        self.added.notify_one();
    }

    /// Pins these images. Returns whether one of them is left for another try.
    async fn pin_late(&self, runtimes: &Runtimes, clock: &Clock) -> bool {
        let late = std::mem::take(&mut *self.late());
        for (key, image) in late {
            // Without one, the job has gone.
            let Some(duration) = self.lock().get(&key).copied() else {
                continue;
            };
            if let Err(PinFailure { why, retryable }) = self.pin(duration, &image, runtimes, clock).await {
                tracing::warn!(
                    image,
                    retryable,
                    "a job joined after the pull: the image is not pinned: {why}"
                );
                if retryable {
                    self.late().entry(key).or_insert(image);
                }
            }
        }
        !self.late().is_empty()
    }

    async fn pin(
        &self,
        duration: SignedDuration,
        image: &str,
        runtimes: &Runtimes,
        clock: &Clock,
    ) -> Result<(), PinFailure> {
        if self.max_duration.is_zero() {
            return Err(PinFailure {
                why: "--max-pin-seconds of this node's daemon is 0".to_owned(),
                retryable: false,
            });
        }
        let until = clock.now().saturating_add(duration.min(self.max_duration));
        let until = until.map_err(|error| PinFailure {
            why: error.to_string(),
            retryable: false,
        })?;
        let runtime = runtimes.preferred().ok_or_else(|| PinFailure {
            why: "the container runtime has gone".to_owned(),
            retryable: true,
        })?;
        pin(runtime.as_ref(), image, until).await
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<TagKey, SignedDuration>> {
        self.durations.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn late(&self) -> std::sync::MutexGuard<'_, BTreeMap<TagKey, String>> {
        self.late.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Pins an image, and waits until kubelet would see it: an old runtime stores the pin without heeding it.
async fn pin(runtime: &dyn Runtime, image: &str, until: Timestamp) -> Result<(), PinFailure> {
    let mut is_unpinned = false;
    let pin = async {
        runtime.pin_image(image, until).await?;
        while !runtime
            .image_status(image)
            .await?
            .is_some_and(|image| image.pinned)
        {
            is_unpinned = true;
            sleep(PIN_INTERVAL).await;
        }
        Ok::<(), Error>(())
    };
    let in_time = timeout(PIN_TIMEOUT, pin).await;
    in_time.map_or_else(
        |_| Err(PinFailure::timed_out(is_unpinned)),
        |result| result.map_err(PinFailure::from),
    )
}

/// Ends pins, and begins those that jobs ask for after the pull, until shutdown.
pub(super) async fn run(ctx: &Context, requests: &PinRequests) {
    let mut runtimes = ctx.runtimes.subscribe();
    loop {
        let look = async {
            let is_left = requests.pin_late(&ctx.runtimes, &ctx.cluster.clock).await;
            let next_end = unpin_ended(ctx).await;
            next_end.into_iter().chain(is_left.then_some(RETRY_PAUSE)).min()
        };
        let wait = catch_panic("image pins", "sweep", look).await;
        tokio::select! {
            () = sleep_or_pend(wait.unwrap_or(Some(RETRY_PAUSE))) => {}
            () = requests.added.notified() => {}
            Ok(()) = runtimes.changed() => {}
        }
    }
}

/// Sleeps, forever without a duration.
pub(super) async fn sleep_or_pend(duration: Option<Duration>) {
    match duration {
        Some(time) => sleep(time).await,
        None => pending().await,
    }
}

/// Ends the pins whose time has come; returns when to look again.
async fn unpin_ended(ctx: &Context) -> Option<Duration> {
    // The node's own clock may be wrong, and a pin that was ended is lost.
    if !ctx.cluster.clock.is_known() {
        return Some(CLOCK_RETRY_PAUSE);
    }
    // Images are pulled by this runtime.
    let runtime = ctx.runtimes.preferred()?;
    let now = ctx.cluster.clock.now();
    match runtime.unpin_ended_images(now).await {
        Ok(pins) => {
            metrics()
                .pinned_images
                .set(i64::try_from(pins.count).unwrap_or(i64::MAX));
            let next = pins.next_end.map_or(MAX_SLEEP, |end| duration_until(end, now));
            Some(next.clamp(Duration::from_secs(1), MAX_SLEEP))
        }
        // A runtime that reports itself as containerd and has no such service has no pins of ours.
        Err(Error::Unimplemented { .. }) => None,
        Err(error) => {
            tracing::warn!(%error, "could not look for images whose pin has ended; will retry");
            Some(RETRY_PAUSE)
        }
    }
}

#[cfg(test)]
mod tests {
    use kruise_cri::DiscoveryOptions;
    use kruise_cri::panicking::PanickingRuntime;

    use super::super::plan::tests::{key, spec_in};
    use super::*;

    fn pulled(note: Option<&str>) -> AttemptResult {
        AttemptResult::Pulled {
            image_id: None,
            note: note.map(str::to_owned),
        }
    }

    #[tokio::test]
    async fn pins_last_until_the_time_is_known() {
        let service = tower::service_fn(|_: http::Request<kube::client::Body>| {
            std::future::ready(
                http::Response::builder()
                    .status(500)
                    .body(kube::client::Body::empty()),
            )
        });
        // Its runtime panics when it is called.
        let ctx = Context::for_test(kube::Client::new(service, "default"));
        assert_eq!(unpin_ended(&ctx).await, Some(CLOCK_RETRY_PAUSE));
    }

    #[tokio::test]
    async fn node_without_pins_says_so() {
        let requests = PinRequests::new(0);
        let (asked, other) = (key("asked"), key("other"));
        let spec = PullSpec {
            pin: Some(SignedDuration::from_secs(5)),
            ..spec_in("n", "a")
        };
        requests.sync(&[(asked.clone(), spec), (other.clone(), spec_in("n", "a"))].into());
        // It is not called.
        let runtimes = Runtimes::from_runtime(PanickingRuntime("containerd"));
        let clock = Clock::default();
        let after_pull = async |key, note| {
            let result = pulled(note);
            requests.after_pull(result, key, "image", &runtimes, &clock).await
        };
        let why = "the image is not pinned: --max-pin-seconds of this node's daemon is 0";
        assert_eq!(after_pull(&asked, None).await, pulled(Some(why)));
        let both = format!("a note; {why}");
        assert_eq!(after_pull(&asked, Some("a note")).await, pulled(Some(&both)));
        assert_eq!(after_pull(&other, None).await, pulled(None));
        requests.add_late(asked.clone(), "image".to_owned());
        assert!(!requests.pin_late(&runtimes, &clock).await, "tried once");
        // The job has gone.
        requests.sync(&BTreeMap::new());
        assert_eq!(after_pull(&asked, None).await, pulled(None));
    }

    #[test]
    fn only_a_runtime_that_has_gone_pins_later() {
        let method = "containerd Images.Get";
        let gone = [
            Error::Unreachable {
                socket: "s".into(),
                method,
                why: "reset".to_owned(),
            },
            Error::Timeout {
                socket: "s".into(),
                method,
                after: PIN_TIMEOUT,
            },
        ];
        let gone = gone.map(PinFailure::from);
        let missing = Error::InvalidResponse {
            socket: "s".into(),
            method,
            why: "it has no such image".to_owned(),
        };
        let retryable = |failure: &PinFailure| failure.retryable;
        assert!(gone.iter().all(retryable) && PinFailure::timed_out(false).retryable);
        assert!(!PinFailure::from(missing).retryable);
        assert!(!PinFailure::timed_out(true).retryable, "it heeds no pin");
    }

    #[tokio::test]
    async fn late_pin_waits_for_the_runtime() {
        let requests = PinRequests::new(60);
        let spec = PullSpec {
            pin: Some(SignedDuration::from_secs(5)),
            ..spec_in("n", "a")
        };
        requests.sync(&[(key("late"), spec)].into());
        requests.add_late(key("late"), "image".to_owned());
        // None has answered.
        let runtimes = Runtimes::new(&DiscoveryOptions::new(Some("/nowhere".into())));
        let clock = Clock::default();
        for _ in 0..2 {
            assert!(requests.pin_late(&runtimes, &clock).await);
        }
        // The job has gone.
        requests.sync(&BTreeMap::new());
        assert!(!requests.pin_late(&runtimes, &clock).await);
    }
}
