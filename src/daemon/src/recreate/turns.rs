//! Asks each container runtime for the containers of a few Pods at a time, whatever their number: all are looked at when
//! the runtime comes back.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout};

use super::plan::{self, Now, Request};
use kruise_cri as cri;
use kruise_ops::progress::Step;

/// Pods whose containers one runtime is asked for at a time.
const AT_ONCE: usize = 16;
/// How long an answer is waited for before a Pod is planned without it.
pub const LOOK: Duration = Duration::from_secs(6);
/// The same where a deadline has passed and nothing but that is to be said.
const LAST_LOOK: Duration = Duration::from_millis(300);
/// How long a turn is waited for before a Pod is planned without it, too: the request then says that it waits, long before
/// the manager says after a minute that no daemon has taken it up.
const QUEUE: Duration = Duration::from_secs(20);
/// Any deadline further away counts as this one; larger than every wait.
const FAR: Duration = Duration::from_secs(86_400);

/// How long a look at a Pod may take: no deadline of its requests is missed for it.
#[derive(Debug, Clone, Copy)]
pub struct Limit {
    deadline: Option<Instant>,
}

impl Limit {
    /// That of a look that begins now.
    pub fn of(requests: &[Arc<Request>], now: Now) -> Self {
        let next = requests
            .iter()
            .filter(|request| !super::over(request))
            .filter_map(|request| plan::deadline(request))
            .min();
        let left = next.map(|at| plan::mono(at, now).saturating_sub(now.mono).min(FAR));
        Self {
            deadline: left.map(|left| Instant::now() + left),
        }
    }

    /// What one call may take.
    pub fn call(self) -> Duration {
        self.left().map_or(LOOK, |left| left.min(LOOK))
    }

    /// What is left until the next deadline; enough for a last look.
    fn left(self) -> Option<Duration> {
        let deadline = self.deadline?;
        Some(deadline.saturating_duration_since(Instant::now()).max(LAST_LOOK))
    }
}

/// Whose turn it is, for each runtime: one that hangs is in no other's way.
#[derive(Debug, Default)]
pub struct Turns {
    runtimes: Mutex<HashMap<PathBuf, Arc<Semaphore>>>,
}

impl Turns {
    /// Asks the runtime at `socket` when it is this Pod's turn. The limit of a call counts from then on.
    ///
    /// # Errors
    /// In words, where there was no answer.
    pub async fn ask<T>(
        &self,
        socket: &Path,
        limit: Limit,
        step: &Step,
        question: impl Future<Output = Result<T, cri::Error>>,
    ) -> Result<T, String> {
        let turns = self.of(socket);
        // Those ahead have limits of their own.
        step.idle(None);
        let longest = limit.left().map_or(QUEUE, |left| left.min(QUEUE));
        let turn = timeout(longest, turns.acquire()).await;
        step.now(format!("asking the runtime at {}", socket.display()), LOOK);
        let Ok(_turn) = turn else {
            return Err(format!(
                "the runtime at {} is still being asked for the containers of other Pods",
                socket.display()
            ));
        };
        let limit = limit.call();
        match timeout(limit, question).await {
            Ok(answer) => answer.map_err(|error| error.to_string()),
            Err(_) => Err(format!(
                "runtime at {} has not answered for {limit:?}",
                socket.display()
            )),
        }
    }

    fn of(&self, socket: &Path) -> Arc<Semaphore> {
        let mut runtimes = self.runtimes.lock().unwrap_or_else(PoisonError::into_inner);
        let turns = runtimes.entry(socket.to_owned());
        Arc::clone(turns.or_insert_with(|| Arc::new(Semaphore::new(AT_ONCE))))
    }
}

#[cfg(test)]
mod tests {
    use futures::future::join_all;
    use jiff::{SignedDuration, Timestamp};
    use tokio::time::sleep;

    use super::*;
    use kruise_ops::progress::Progress;

    const NO_DEADLINE: Limit = Limit { deadline: None };

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn until(left: u64) -> Limit {
        Limit {
            deadline: Some(Instant::now() + seconds(left)),
        }
    }

    /// Asks a runtime that answers after so long.
    async fn ask(turns: &Turns, socket: &str, limit: Limit, after: Duration) -> Result<(), String> {
        let step = Progress::default().waiting("test");
        let answer = async {
            sleep(after).await;
            Ok(())
        };
        turns.ask(Path::new(socket), limit, &step, answer).await
    }

    #[tokio::test(start_paused = true)]
    async fn the_queue_for_a_slow_runtime_does_not_count_as_its_answer() {
        let (turns, began) = (Turns::default(), Instant::now());
        let pods = (0..64).map(|_| ask(&turns, "/a", NO_DEADLINE, seconds(5)));
        let answers = join_all(pods).await;
        assert!(answers.iter().all(Result::is_ok), "{answers:?}");
        // Four times 16.
        assert_eq!(began.elapsed(), seconds(20));
    }

    #[tokio::test(start_paused = true)]
    async fn however_many_pods_are_in_the_queue_each_is_planned_in_time() {
        let (turns, began) = (Turns::default(), Instant::now());
        let pods = (0..500).map(|_| ask(&turns, "/a", NO_DEADLINE, FAR));
        let answers = join_all(pods).await;
        assert!(answers.iter().all(Result::is_err));
        assert!(began.elapsed() <= QUEUE + LOOK, "{:?}", began.elapsed());
    }

    #[tokio::test(start_paused = true)]
    async fn a_runtime_that_hangs_is_not_in_the_way_of_another_one() {
        let turns = Turns::default();
        let hangs = join_all((0..40).map(|_| ask(&turns, "/hangs", NO_DEADLINE, FAR)));
        let answers = async {
            // The others are in the queue.
            tokio::task::yield_now().await;
            let began = Instant::now();
            let answer = ask(&turns, "/works", NO_DEADLINE, Duration::ZERO).await;
            (answer, began.elapsed() < LOOK)
        };
        let (hung, answer) = tokio::join!(hangs, answers);
        assert_eq!(answer, (Ok(()), true));
        let words = "runtime at /hangs has not answered for 6s";
        assert_eq!(hung, vec![Err(words.to_owned()); 40]);
    }

    #[tokio::test(start_paused = true)]
    async fn neither_the_queue_nor_the_call_goes_beyond_the_next_deadline() {
        let (turns, began) = (Turns::default(), Instant::now());
        let pods = (0..AT_ONCE).map(|_| ask(&turns, "/a", NO_DEADLINE, FAR));
        let late = async {
            tokio::task::yield_now().await;
            (ask(&turns, "/a", until(2), FAR).await, began.elapsed())
        };
        let (_, (answer, took)) = tokio::join!(join_all(pods), late);
        let words = "the runtime at /a is still being asked for the containers of other Pods";
        assert_eq!((answer, took), (Err(words.to_owned()), seconds(2)));

        let began = Instant::now();
        let answer = ask(&turns, "/a", until(2), FAR).await;
        let words = "runtime at /a has not answered for 2s";
        assert_eq!((answer, began.elapsed()), (Err(words.to_owned()), seconds(2)));
    }

    #[tokio::test(start_paused = true)]
    async fn a_look_ends_before_the_next_deadline_of_a_request() {
        let request = |deadline_seconds| {
            Arc::new(Request {
                created: Timestamp::UNIX_EPOCH,
                deadline_seconds,
                ..Request::default()
            })
        };
        let second = |seconds| {
            let api = Timestamp::UNIX_EPOCH + SignedDuration::from_secs(seconds);
            Now {
                api,
                wall: api,
                mono: Duration::from_secs(1000),
            }
        };
        let requests = [request(None), request(Some(10)), request(Some(90))];
        let call = |requests: &[Arc<Request>], at| Limit::of(requests, second(at)).call();
        assert_eq!(call(&requests, 0), LOOK);
        assert_eq!(call(&requests, 8), seconds(2));
        assert_eq!(call(&requests, 10), LAST_LOOK);
        assert_eq!(call(&requests, 20), LAST_LOOK);
        assert_eq!(call(&requests[..1], 10), LOOK);
        // What has been waited for before counts.
        let limit = Limit::of(&requests, second(0));
        sleep(seconds(7)).await;
        assert_eq!(limit.call(), seconds(3));
    }
}
