//! What our programs take while all goes on, and whether it grows.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::bed::{Bed, OURS, Ours};

/// What grows where a program forgets to let go.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Of memory of its own.
    pub kilobytes: u64,
    pub open_files: u64,
    pub tasks: u64,
}

/// What a program has to do. Only looks at the same situation are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Situation {
    Daemon,
    Webhook,
    /// A manager that has never led.
    Standby,
    Leader,
    FormerLeader,
}

/// A look at one of our programs.
#[derive(Clone, Copy, Debug)]
struct Sample {
    which: Ours,
    /// How often it was killed before.
    life: u32,
    situation: Situation,
    sizes: Sizes,
}

/// All looks.
pub struct Growth {
    start: Instant,
    pace: Duration,
    next: Instant,
    /// How often each was killed, and how often it had become leader by then.
    lives: [(u32, usize); OURS.len()],
    samples: Vec<Sample>,
}

/// Fewer looks at one life in one situation do not show how it goes on.
const ENOUGH: usize = 9;
/// Clients of the API server close idle connections after 90 s, reviews' clients after two minutes.
const REST: Duration = Duration::from_secs(180);

impl Sizes {
    /// Element by element.
    fn median<'a>(all: impl Iterator<Item = &'a Self> + Clone) -> Self {
        let of = |part: fn(&Self) -> u64| {
            let mut sorted: Vec<u64> = all.clone().map(part).collect();
            sorted.sort_unstable();
            sorted[sorted.len() / 2]
        };
        Self {
            kilobytes: of(|sizes| sizes.kilobytes),
            open_files: of(|sizes| sizes.open_files),
            tasks: of(|sizes| sizes.tasks),
        }
    }

    /// In the middle of things, compared with what is usual then.
    fn is_usual(&self, median: &Self) -> bool {
        self.kilobytes <= 2 * median.kilobytes + 8 * 1024
            && self.open_files <= 2 * median.open_files + 64
            && self.tasks <= 2 * median.tasks + 64
    }

    /// At the end of a long time, compared with its beginning, or when there is nothing to do any more.
    fn has_not_grown(&self, since: &Self) -> bool {
        self.kilobytes <= since.kilobytes * 5 / 4 + 1024
            && self.open_files <= since.open_files + 32
            && self.tasks <= since.tasks * 5 / 4 + 16
    }
}

impl Growth {
    /// Looks every minute, more often in a short run; at once first.
    pub fn over(length: Duration, bed: &Bed) -> Self {
        let start = Instant::now();
        let mut growth = Self {
            start,
            pace: Duration::from_secs(60).min(length / 10),
            next: start,
            lives: [(0, 0); OURS.len()],
            samples: Vec::new(),
        };
        growth.look(bed);
        growth
    }

    /// Looks at all programs when it is time.
    pub fn look(&mut self, bed: &Bed) {
        if Instant::now() < self.next {
            return;
        }
        self.next = Instant::now() + self.pace;
        let latest: Vec<Sample> = OURS.iter().filter_map(|which| self.sample(bed, *which)).collect();
        self.samples.extend(&latest);
        let latest: Vec<String> = latest.iter().map(Sample::to_string).collect();
        let seconds = self.start.elapsed().as_secs();
        println!("         after {seconds} s: {}", latest.join("; "));
    }

    /// Takes a last look at a program that will be killed.
    pub fn ends(&mut self, bed: &Bed, which: Ours) {
        let last = self.sample(bed, which);
        self.samples.extend(last);
        let (life, before) = &mut self.lives[which as usize];
        (*life, *before) = (*life + 1, elections(bed, which));
    }

    /// None of one that was just started and does not answer yet.
    fn sample(&self, bed: &Bed, which: Ours) -> Option<Sample> {
        let sizes = bed.sizes(which)?;
        let (life, before) = self.lives[which as usize];
        let situation = match which {
            Ours::Daemon => Situation::Daemon,
            Ours::Webhook => Situation::Webhook,
            _ if bed.readiness(which).contains("leading") => Situation::Leader,
            // It may have led between two looks.
            _ if elections(bed, which) > before => Situation::FormerLeader,
            _ => Situation::Standby,
        };
        Some(Sample {
            which,
            life,
            situation,
            sizes,
        })
    }

    /// What is usual in this situation.
    fn usual(&self, situation: Situation) -> Option<Sizes> {
        let like = self.samples.iter().filter(|sample| sample.situation == situation);
        like.clone().next()?;
        Some(Sizes::median(like.map(|sample| &sample.sizes)))
    }

    /// No program took much more than usual, grew while it lived, or has kept anything.
    pub async fn check(self, bed: &Bed) {
        let mut lives: BTreeMap<_, Vec<Sizes>> = BTreeMap::new();
        for sample in &self.samples {
            let usual = self.usual(sample.situation).unwrap();
            assert!(
                sample.sizes.is_usual(&usual),
                "{sample}, where {usual:?} is usual"
            );
            let life = (sample.which as usize, sample.life, sample.situation);
            lives.entry(life).or_default().push(sample.sizes);
        }
        for ((which, life, situation), looks) in lives.iter().filter(|(_, looks)| looks.len() >= ENOUGH) {
            let third = looks.len() / 3;
            let first = Sizes::median(looks[..third].iter());
            let last = Sizes::median(looks[looks.len() - third..].iter());
            let what = format!(
                "life {life} of {:?} as {situation:?}: at first {first:?}, at last {last:?}",
                OURS[*which]
            );
            assert!(last.has_not_grown(&first), "{what}");
            println!("{what}, {} looks", looks.len());
        }
        for which in OURS {
            let start = Instant::now();
            loop {
                let sample = self.sample(bed, which);
                let usual = sample.and_then(|sample| self.usual(sample.situation));
                match (sample, usual) {
                    (Some(sample), Some(usual)) if sample.sizes.has_not_grown(&usual) => {
                        println!("at the end {sample}, where {usual:?} was usual");
                        break;
                    }
                    // It came into this situation after the last look.
                    (Some(sample), None) => {
                        println!("at the end {sample}");
                        break;
                    }
                    _ => assert!(
                        start.elapsed() < REST,
                        "{which:?}: {sample:?}, where {usual:?} was usual"
                    ),
                }
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
        }
    }
}

/// How often it has become leader, all lives together.
fn elections(bed: &Bed, which: Ours) -> usize {
    let log = std::fs::read_to_string(bed.log(which)).unwrap_or_default();
    log.matches("became leader").count()
}

impl std::fmt::Display for Sample {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            which,
            life,
            situation,
            sizes,
        } = self;
        let Sizes {
            kilobytes,
            open_files,
            tasks,
        } = sizes;
        write!(
            f,
            "{which:?} (life {life}, {situation:?}) has {kilobytes} kB, {open_files} files, {tasks} tasks"
        )
    }
}
