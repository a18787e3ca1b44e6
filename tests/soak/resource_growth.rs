//! Resource usage of our programs during the run, and whether it grows.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::soak_cluster::{PROGRAMS, Program, SoakCluster};

/// Resources that grow if a program leaks them.
#[derive(Clone, Copy, Debug)]
pub struct ResourceUsage {
    /// Private memory.
    pub kilobytes: u64,
    pub open_files: u64,
    pub tasks: u64,
}

/// Work of a program. Only samples of the same role are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Role {
    Daemon,
    Webhook,
    /// A manager that has never been leader.
    Standby,
    Leader,
    FormerLeader,
}

/// A sample of one of our programs.
#[derive(Clone, Copy, Debug)]
struct UsageSample {
    program: Program,
    /// How often it was killed before.
    incarnation: u32,
    role: Role,
    usage: ResourceUsage,
}

pub struct GrowthMonitor {
    start: Instant,
    interval: Duration,
    next_sample: Instant,
    /// How often each was killed, and how often it had become leader by then.
    incarnations: [(u32, usize); PROGRAMS.len()],
    samples: Vec<UsageSample>,
}

/// Fewer samples of one incarnation and role do not show a trend.
const MIN_SAMPLES: usize = 9;
/// Clients of the API server close idle connections after 90 s, reviews' clients after two minutes.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(180);

impl ResourceUsage {
    /// Of each field.
    fn median<'a>(all: impl Iterator<Item = &'a Self> + Clone) -> Self {
        let median_of = |part: fn(&Self) -> u64| {
            let mut sorted: Vec<u64> = all.clone().map(part).collect();
            sorted.sort_unstable();
            sorted[sorted.len() / 2]
        };
        Self {
            kilobytes: median_of(|sizes| sizes.kilobytes),
            open_files: median_of(|sizes| sizes.open_files),
            tasks: median_of(|sizes| sizes.tasks),
        }
    }

    /// Under load, compared with the median under load.
    fn is_within_usual(&self, median: &Self) -> bool {
        self.kilobytes <= 2 * median.kilobytes + 8 * 1024
            && self.open_files <= 2 * median.open_files + 64
            && self.tasks <= 2 * median.tasks + 64
    }

    /// At the end of a long time, compared with its beginning, or when the program is idle again.
    fn has_not_grown(&self, since: &Self) -> bool {
        self.kilobytes <= since.kilobytes * 5 / 4 + 1024
            && self.open_files <= since.open_files + 32
            && self.tasks <= since.tasks * 5 / 4 + 16
    }
}

impl GrowthMonitor {
    /// Samples every minute, more often in a short run; the first time at once.
    pub fn start_sampling(length: Duration, cluster: &SoakCluster) -> Self {
        let start = Instant::now();
        let mut growth = Self {
            start,
            interval: Duration::from_secs(60).min(length / 10),
            next_sample: start,
            incarnations: [(0, 0); PROGRAMS.len()],
            samples: Vec::new(),
        };
        growth.take_samples(cluster);
        growth
    }

    /// Samples all programs when it is time.
    pub fn take_samples(&mut self, cluster: &SoakCluster) {
        if Instant::now() < self.next_sample {
            return;
        }
        self.next_sample = Instant::now() + self.interval;
        let latest: Vec<UsageSample> = PROGRAMS
            .iter()
            .filter_map(|which| self.sample(cluster, *which))
            .collect();
        self.samples.extend(&latest);
        let latest: Vec<String> = latest.iter().map(UsageSample::to_string).collect();
        let seconds = self.start.elapsed().as_secs();
        println!("         after {seconds} s: {}", latest.join("; "));
    }

    /// Takes a last sample of a program that will be killed.
    pub fn record_kill(&mut self, cluster: &SoakCluster, which: Program) {
        let last = self.sample(cluster, which);
        self.samples.extend(last);
        let (life, before) = &mut self.incarnations[which as usize];
        (*life, *before) = (*life + 1, election_count(cluster, which));
    }

    /// None for a program that was just started and does not respond yet.
    fn sample(&self, cluster: &SoakCluster, which: Program) -> Option<UsageSample> {
        let usage = cluster.resource_usage(which)?;
        let (incarnation, elections_before) = self.incarnations[which as usize];
        let situation = match which {
            Program::Daemon => Role::Daemon,
            Program::Webhook => Role::Webhook,
            _ if cluster.readyz(which).contains("leading") => Role::Leader,
            // It may have been leader between two samples.
            _ if election_count(cluster, which) > elections_before => Role::FormerLeader,
            _ => Role::Standby,
        };
        Some(UsageSample {
            program: which,
            incarnation,
            role: situation,
            usage,
        })
    }

    /// Median usage in this role.
    fn median_usage(&self, situation: Role) -> Option<ResourceUsage> {
        let same_role = self.samples.iter().filter(|sample| sample.role == situation);
        same_role.clone().next()?;
        Some(ResourceUsage::median(same_role.map(|sample| &sample.usage)))
    }

    /// Asserts that no program used much more than the median, grew while it ran, or leaked anything.
    pub async fn check(self, cluster: &SoakCluster) {
        let mut by_incarnation: BTreeMap<_, Vec<ResourceUsage>> = BTreeMap::new();
        for sample in &self.samples {
            let usual = self.median_usage(sample.role).unwrap();
            assert!(
                sample.usage.is_within_usual(&usual),
                "{sample}, where {usual:?} is usual"
            );
            let key = (sample.program as usize, sample.incarnation, sample.role);
            by_incarnation.entry(key).or_default().push(sample.usage);
        }
        for ((which, life, situation), looks) in by_incarnation
            .iter()
            .filter(|(_, looks)| looks.len() >= MIN_SAMPLES)
        {
            let third = looks.len() / 3;
            let first = ResourceUsage::median(looks[..third].iter());
            let last = ResourceUsage::median(looks[looks.len() - third..].iter());
            let what = format!(
                "life {life} of {:?} as {situation:?}: at first {first:?}, at last {last:?}",
                PROGRAMS[*which]
            );
            assert!(last.has_not_grown(&first), "{what}");
            println!("{what}, {} looks", looks.len());
        }
        for which in PROGRAMS {
            let start = Instant::now();
            loop {
                let sample = self.sample(cluster, which);
                let usual = sample.and_then(|sample| self.median_usage(sample.role));
                match (sample, usual) {
                    (Some(sample), Some(usual)) if sample.usage.has_not_grown(&usual) => {
                        println!("at the end {sample}, where {usual:?} was usual");
                        break;
                    }
                    // It changed to this role after the last sample.
                    (Some(sample), None) => {
                        println!("at the end {sample}");
                        break;
                    }
                    _ => assert!(
                        start.elapsed() < SETTLE_TIMEOUT,
                        "{which:?}: {sample:?}, where {usual:?} was usual"
                    ),
                }
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
        }
    }
}

/// How often it has become leader, over all incarnations.
fn election_count(cluster: &SoakCluster, which: Program) -> usize {
    let log = std::fs::read_to_string(cluster.log(which)).unwrap_or_default();
    log.matches("became leader").count()
}

impl std::fmt::Display for UsageSample {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            program: which,
            incarnation: life,
            role: situation,
            usage: sizes,
        } = self;
        let ResourceUsage {
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
