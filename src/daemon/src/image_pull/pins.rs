//! Images that kubelet's garbage collection leaves alone for as long as a job says.
//!
//! In:  the pins that the NodeImage asks for, images that were pulled.
//! Out: pins in the runtime, metric `pinned_images`, notes on what could not be pinned.
//!
//! The runtime stores each pin with its end, so that a later daemon ends it. Nothing is called while there are none.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use tokio::sync::Notify;
use tokio::time::{sleep, timeout};

use super::controller::sleep_or_pend;
use super::plan::{AttemptResult, PullSpec, TagKey};
use crate::Context;
use kruise_cluster::clock::{Clock, duration_until};
use kruise_cri::{Error, Runtime, Runtimes};
use kruise_ops::metrics::metrics;
use kruise_ops::panics::catch_panic;

/// From one look at the pins to the next, at most: the clock may be corrected meanwhile.
const MAX_SLEEP: Duration = Duration::from_secs(3600);
/// Pause after the runtime could not be asked.
const RETRY_PAUSE: Duration = Duration::from_secs(300);
/// How long the runtime has to store a pin, and to report it.
pub(super) const PIN_TIMEOUT: Duration = Duration::from_secs(5);
/// The pauses between questions about it; there is no event.
const PIN_INTERVAL: Duration = Duration::from_millis(200);

/// The pins that jobs ask for now.
#[derive(Debug, Default)]
pub(super) struct PinRequests {
    durations: Mutex<BTreeMap<TagKey, SignedDuration>>,
    /// An image was pinned.
    added: Notify,
}

impl PinRequests {
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
        let duration = self.lock().get(key).copied();
        let until = duration.and_then(|duration| clock.now().saturating_add(duration).ok());
        if let Some((until, runtime)) = until.zip(runtimes.preferred()) {
            if let Err(why) = pin(runtime.as_ref(), image, until).await {
                let why = format!("the image is not pinned: {why}");
                *note = Some(note.take().map_or(why.clone(), |note| format!("{note}; {why}")));
            }
            self.added.notify_one();
        }
        result
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<TagKey, SignedDuration>> {
        self.durations.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Pins an image, and waits until kubelet would see it: an old runtime stores the pin without heeding it.
async fn pin(runtime: &dyn Runtime, image: &str, until: Timestamp) -> Result<(), String> {
    let pin = async {
        runtime.pin_image(image, until).await?;
        while !runtime
            .image_status(image)
            .await?
            .is_some_and(|image| image.pinned)
        {
            sleep(PIN_INTERVAL).await;
        }
        Ok::<(), Error>(())
    };
    match timeout(PIN_TIMEOUT, pin).await {
        Ok(result) => result.map_err(|error| error.to_string()),
        Err(_) => Err("the runtime does not report it as pinned".to_owned()),
    }
}

/// Ends pins until shutdown.
pub(super) async fn run(ctx: &Context, requests: &PinRequests) {
    let mut runtimes = ctx.runtimes.subscribe();
    loop {
        let wait = catch_panic("image pins", "sweep", unpin_ended(ctx)).await;
        tokio::select! {
            () = sleep_or_pend(wait.unwrap_or(Some(RETRY_PAUSE))) => {}
            () = requests.added.notified() => {}
            Ok(()) = runtimes.changed() => {}
        }
    }
}

/// Ends the pins whose time has come; returns when the next one does, if there are any.
async fn unpin_ended(ctx: &Context) -> Option<Duration> {
    // Images are pulled by this runtime.
    let runtime = ctx.runtimes.preferred()?;
    let now = ctx.cluster.clock.now();
    match runtime.unpin_ended_images(now).await {
        Ok(pins) => {
            metrics()
                .pinned_images
                .set(i64::try_from(pins.count).unwrap_or(i64::MAX));
            let next = pins.next_end.map(|end| duration_until(end, now));
            next.map(|wait| wait.clamp(Duration::from_secs(1), MAX_SLEEP))
        }
        // A runtime that reports itself as containerd and has no such service has no pins of ours.
        Err(Error::Unimplemented { .. }) => None,
        Err(error) => {
            tracing::warn!(%error, "could not look for images whose pin has ended; it is repeated");
            Some(RETRY_PAUSE)
        }
    }
}
