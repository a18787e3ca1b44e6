//! Limits the concurrent calls to each container runtime, for any number of Pods: all Pods are reconciled when a
//! runtime comes back.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use jiff::SignedDuration;
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout};

use super::plan::{self, Clocks, RecreateRequest};
use kruise_cluster::clock::duration_until;
use kruise_cri as cri;

/// Maximum number of concurrent calls to one runtime, each for the containers of one Pod.
const MAX_CONCURRENT_CALLS: usize = 16;
/// Timeout of an answer, after which a Pod is planned without it.
const OBSERVE_TIMEOUT: Duration = Duration::from_secs(6);
/// The same when a deadline has passed and only the end must be reported.
const MIN_OBSERVE_TIMEOUT: Duration = Duration::from_millis(300);
/// How long after its deadline a request still limits the observations of its Pod: if its end cannot be written, the
/// others still need full observations.
const OVERDUE_AFTER: SignedDuration = SignedDuration::from_secs(5);
/// Timeout in the queue, after which a Pod is planned without an answer, too: the request then reports that it waits,
/// long before the manager reports after a minute that no daemon has started it.
const QUEUE_TIMEOUT: Duration = Duration::from_secs(20);
/// Any later deadline is reduced to this one; larger than every wait.
const MAX_DEADLINE: Duration = Duration::from_secs(86_400);

/// When an observation must end, so that no deadline of a request is missed.
#[derive(Debug, Clone, Copy)]
pub struct ObserveLimit(Instant);

impl ObserveLimit {
    /// The limit of an observation that starts now.
    pub fn for_requests(requests: &[Arc<RecreateRequest>], now: Clocks) -> Self {
        let unfinished = requests.iter().filter(|request| !request.is_finished());
        let deadlines = unfinished.filter_map(|request| plan::deadline(request));
        let limiting = deadlines.filter(|at| now.api.duration_since(*at) < OVERDUE_AFTER);
        let time_left = limiting.map(|at| duration_until(at, now.api)).min();
        Self(Instant::now() + time_left.unwrap_or(MAX_DEADLINE).min(MAX_DEADLINE))
    }

    /// Timeout of one call.
    pub fn call_timeout(self) -> Duration {
        self.at_most(OBSERVE_TIMEOUT)
    }

    /// The time left, but enough for a last observation.
    fn at_most(self, timeout: Duration) -> Duration {
        let left = self.0.saturating_duration_since(Instant::now());
        left.max(MIN_OBSERVE_TIMEOUT).min(timeout)
    }
}

/// One queue for each runtime: a hanging runtime does not block the others.
#[derive(Debug, Default)]
pub struct RuntimeQueue {
    semaphores: Mutex<HashMap<PathBuf, Arc<Semaphore>>>,
}

impl RuntimeQueue {
    /// Calls the runtime at `socket` when it is this Pod's turn. The timeout of the call starts then.
    ///
    /// # Errors
    /// A message, if there was no answer.
    pub async fn call<T>(
        &self,
        socket: &Path,
        limit: ObserveLimit,
        request: impl Future<Output = Result<T, cri::Error>>,
    ) -> Result<T, String> {
        let semaphore = self.semaphore(socket);
        let permit = timeout(limit.at_most(QUEUE_TIMEOUT), semaphore.acquire()).await;
        let Ok(_permit) = permit else {
            return Err(format!(
                "the runtime at {} is still listing the containers of other Pods",
                socket.display()
            ));
        };
        let limit = limit.call_timeout();
        match timeout(limit, request).await {
            Ok(answer) => answer.map_err(|error| error.to_string()),
            Err(_) => Err(format!(
                "runtime at {} has not answered for {limit:?}",
                socket.display()
            )),
        }
    }

    fn semaphore(&self, socket: &Path) -> Arc<Semaphore> {
        let mut semaphores = self.semaphores.lock().unwrap_or_else(PoisonError::into_inner);
        let entry = semaphores.entry(socket.to_owned());
        Arc::clone(entry.or_insert_with(|| Arc::new(Semaphore::new(MAX_CONCURRENT_CALLS))))
    }
}

#[cfg(test)]
mod tests {
    use futures::future::join_all;
    use jiff::Timestamp;
    use tokio::time::sleep;

    use super::*;

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn with_deadline(seconds_left: u64) -> ObserveLimit {
        ObserveLimit(Instant::now() + seconds(seconds_left))
    }

    fn no_deadline() -> ObserveLimit {
        ObserveLimit(Instant::now() + MAX_DEADLINE)
    }

    /// Calls a runtime that answers after `delay`.
    async fn call(
        runtime_queue: &RuntimeQueue,
        socket: &str,
        limit: ObserveLimit,
        delay: Duration,
    ) -> Result<(), String> {
        let response = async {
            sleep(delay).await;
            Ok(())
        };
        runtime_queue.call(Path::new(socket), limit, response).await
    }

    #[tokio::test(start_paused = true)]
    async fn time_in_runtime_queue_does_not_count_as_call_time() {
        let (runtime_queue, started) = (RuntimeQueue::default(), Instant::now());
        let pods = (0..64).map(|_| call(&runtime_queue, "/a", no_deadline(), seconds(5)));
        let answers = join_all(pods).await;
        assert!(answers.iter().all(Result::is_ok), "{answers:?}");
        // Four times 16.
        assert_eq!(started.elapsed(), seconds(20));
    }

    #[tokio::test(start_paused = true)]
    async fn long_runtime_queue_times_out_for_every_pod() {
        let (runtime_queue, started) = (RuntimeQueue::default(), Instant::now());
        let pods = (0..500).map(|_| call(&runtime_queue, "/a", no_deadline(), MAX_DEADLINE));
        let answers = join_all(pods).await;
        assert!(answers.iter().all(Result::is_err));
        assert!(
            started.elapsed() <= QUEUE_TIMEOUT + OBSERVE_TIMEOUT,
            "{:?}",
            started.elapsed()
        );
    }

    #[tokio::test(start_paused = true)]
    async fn hanging_runtime_does_not_block_another_runtime() {
        let runtime_queue = RuntimeQueue::default();
        let hanging_calls =
            join_all((0..40).map(|_| call(&runtime_queue, "/hangs", no_deadline(), MAX_DEADLINE)));
        let answers = async {
            // Lets the other calls enter the queue.
            tokio::task::yield_now().await;
            let began = Instant::now();
            let answer = call(&runtime_queue, "/works", no_deadline(), Duration::ZERO).await;
            (answer, began.elapsed() < OBSERVE_TIMEOUT)
        };
        let (hung, answer) = tokio::join!(hanging_calls, answers);
        assert_eq!(answer, (Ok(()), true));
        let expected = "runtime at /hangs has not answered for 6s";
        assert_eq!(hung, vec![Err(expected.to_owned()); 40]);
    }

    #[tokio::test(start_paused = true)]
    async fn queue_and_call_end_at_the_next_request_deadline() {
        let (runtime_queue, started) = (RuntimeQueue::default(), Instant::now());
        let pods = (0..MAX_CONCURRENT_CALLS).map(|_| call(&runtime_queue, "/a", no_deadline(), MAX_DEADLINE));
        let late = async {
            tokio::task::yield_now().await;
            (
                call(&runtime_queue, "/a", with_deadline(2), MAX_DEADLINE).await,
                started.elapsed(),
            )
        };
        let (_, (answer, took)) = tokio::join!(join_all(pods), late);
        let expected = "the runtime at /a is still listing the containers of other Pods";
        assert_eq!((answer, took), (Err(expected.to_owned()), seconds(2)));

        let began = Instant::now();
        let answer = call(&runtime_queue, "/a", with_deadline(2), MAX_DEADLINE).await;
        let expected = "runtime at /a has not answered for 2s";
        assert_eq!((answer, began.elapsed()), (Err(expected.to_owned()), seconds(2)));
    }

    #[tokio::test(start_paused = true)]
    async fn observe_timeout_ends_at_the_request_deadline() {
        let request = |deadline_seconds| {
            Arc::new(RecreateRequest {
                created_at: Timestamp::UNIX_EPOCH,
                deadline_seconds,
                ..RecreateRequest::default()
            })
        };
        let now_at = |seconds| {
            let api = Timestamp::UNIX_EPOCH + SignedDuration::from_secs(seconds);
            Clocks {
                api,
                wall: api,
                mono: Duration::from_secs(1000),
            }
        };
        let requests = [request(None), request(Some(10)), request(Some(90))];
        let call = |requests: &[Arc<RecreateRequest>], at| {
            ObserveLimit::for_requests(requests, now_at(at)).call_timeout()
        };
        assert_eq!(call(&requests, 0), OBSERVE_TIMEOUT);
        assert_eq!(call(&requests, 8), seconds(2));
        assert_eq!(call(&requests, 10), MIN_OBSERVE_TIMEOUT);
        assert_eq!(call(&requests, 14), MIN_OBSERVE_TIMEOUT);
        // The end of the second cannot be written.
        assert_eq!(call(&requests, 20), OBSERVE_TIMEOUT);
        assert_eq!(call(&requests, 88), seconds(2));
        assert_eq!(call(&requests[..2], 20), OBSERVE_TIMEOUT);
        assert_eq!(call(&requests[1..2], 20), OBSERVE_TIMEOUT);
        assert_eq!(call(&requests[..1], 10), OBSERVE_TIMEOUT);
        // Earlier waiting time counts.
        let limit = ObserveLimit::for_requests(&requests, now_at(0));
        sleep(seconds(7)).await;
        assert_eq!(limit.call_timeout(), seconds(3));
    }
}
