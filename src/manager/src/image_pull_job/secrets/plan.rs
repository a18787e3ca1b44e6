//! Which copies of pull secrets to create, change and delete.
//!
//! A copy has only the credentials of its source; one annotation names the source, another lists the jobs that need the
//! copy. It is deleted some seconds after the last of these jobs ends.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Duration;

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use kruise_api::keys;
use kruise_cluster::Key;

/// How long a copy is kept after the last job that needs it, so that a series of jobs does not create and delete it
/// each time.
pub const UNUSED_COPY_TTL: Duration = Duration::from_secs(5);

/// The types of Secrets with registry credentials, each with the key of the credentials.
const CREDENTIALS: [(&str, &str); 2] = [
    ("kubernetes.io/dockerconfigjson", ".dockerconfigjson"),
    ("kubernetes.io/dockercfg", ".dockercfg"),
];

/// The copied data of a source.
type SecretData = BTreeMap<String, ByteString>;

/// The type and the credentials of a Secret that has any. Other data is never copied: a user who may name a Secret in a
/// job need not be allowed to read it.
fn credentials(secret: &Secret) -> Option<(&'static str, SecretData)> {
    let type_ = secret.type_.as_deref()?;
    let (type_, key) = CREDENTIALS.into_iter().find(|(name, _)| *name == type_)?;
    let value = secret.data.as_ref()?.get(key)?;
    Some((type_, [(key.to_owned(), value.clone())].into()))
}

/// Cached metadata of a Secret in the daemons' namespace, never its data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CopyView {
    /// Name of the copy.
    pub name: String,
    /// UID of the object.
    pub uid: String,
    /// The resource version for conditional writes.
    pub resource_version: String,
    /// `namespace/name` of its source.
    pub source: String,
    /// `namespace/name` of the jobs that need it.
    pub references: BTreeSet<String>,
    /// Type of the Secret.
    pub type_: Option<String>,
    /// A hash of its data.
    pub digest: u64,
}

impl CopyView {
    /// The cached part of a Secret; `None` when it is no copy.
    #[must_use]
    pub fn from_secret(secret: &Secret) -> Option<Self> {
        let annotations = secret.metadata.annotations.as_ref()?;
        let references = annotations
            .get(keys::SECRET_REFERENCES)
            .map_or("", String::as_str);
        Some(Self {
            name: secret.metadata.name.clone()?,
            uid: secret.metadata.uid.clone().unwrap_or_default(),
            resource_version: secret.metadata.resource_version.clone().unwrap_or_default(),
            source: annotations.get(keys::SECRET_SOURCE_KEY)?.clone(),
            references: references
                .split(',')
                .filter(|r| !r.is_empty())
                .map(str::to_owned)
                .collect(),
            type_: secret.type_.clone(),
            digest: digest(secret.data.as_ref()),
        })
    }
}

/// What to do about one copy.
#[derive(Clone, Debug, PartialEq)]
pub enum CopyStep {
    /// The copy is current.
    Nothing,
    /// Create this copy.
    Create(Box<Secret>),
    /// Replace it with this copy.
    Replace(Box<Secret>),
    /// Delete the one with that UID.
    Delete(String),
}

/// Content of a source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SourceKind {
    /// Registry credentials of a known type.
    Credentials,
    /// A Secret without credentials.
    NoCredentials,
    /// The Secret does not exist.
    Missing,
}

/// The plan of one copy.
#[derive(Clone, Debug, PartialEq)]
pub struct CopyPlan {
    /// Name of the copy; also of one that cannot be created, so that the daemon reports that it is missing.
    pub copy: String,
    /// What to do about the copy.
    pub step: CopyStep,
    /// Content of the source.
    pub source: SourceKind,
}

/// Plans the copy of one source for a job. `copies` are all existing ones.
#[must_use]
pub fn plan_copy(
    source: &Key,
    source_secret: Option<&Secret>,
    copies: &[&CopyView],
    job: &str,
    copy_namespace: &str,
) -> CopyPlan {
    let key = source.to_string();
    let same_source = copies.iter().filter(|c| c.source == key);
    let copy = same_source
        .max_by_key(|c| (c.references.contains(job), std::cmp::Reverse(c.name.as_str())))
        .copied();
    let name = copy.map_or_else(|| copy_name(source, copies), |c| c.name.clone());
    let source_credentials = source_secret.map(credentials);
    let step = match (source_credentials.clone().flatten(), copy) {
        (None, None) => CopyStep::Nothing,
        (None, Some(copy)) => CopyStep::Delete(copy.uid.clone()),
        (Some(held), None) => {
            let new = copy_secret(&name, copy_namespace, &key, held, [job.to_owned()].into());
            CopyStep::Create(Box::new(new))
        }
        // The type of a Secret is immutable; the copy is created again after its deletion.
        (Some((type_, _)), Some(copy)) if copy.type_.as_deref() != Some(type_) => {
            CopyStep::Delete(copy.uid.clone())
        }
        (Some(held), Some(copy)) => {
            let mut references = copy.references.clone();
            let new = references.insert(job.to_owned());
            if !new && copy.digest == digest(Some(&held.1)) {
                CopyStep::Nothing
            } else {
                let mut secret = copy_secret(&name, copy_namespace, &key, held, references);
                secret.metadata.uid = Some(copy.uid.clone());
                secret.metadata.resource_version = Some(copy.resource_version.clone());
                CopyStep::Replace(Box::new(secret))
            }
        }
    };
    let source = match source_credentials {
        Some(Some(_)) => SourceKind::Credentials,
        Some(None) => SourceKind::NoCredentials,
        None => SourceKind::Missing,
    };
    CopyPlan {
        copy: name,
        step,
        source,
    }
}

/// The references of a copy after the job is removed from them.
#[must_use]
pub fn references_without(copy: &CopyView, job: &str) -> String {
    let mut remaining = copy.references.clone();
    remaining.remove(job);
    join_references(&remaining)
}

/// The jobs that must reconcile a copy after a change of it: all of them if it was deleted or has other content, and
/// those that were removed from it.
#[must_use]
pub fn affected_jobs(old: Option<&CopyView>, new: Option<&CopyView>) -> BTreeSet<String> {
    let (Some(old), Some(new)) = (old, new) else {
        return old
            .or(new)
            .map(|copy| copy.references.clone())
            .unwrap_or_default();
    };
    let content = |copy: &CopyView| {
        (
            copy.uid.clone(),
            copy.source.clone(),
            copy.type_.clone(),
            copy.digest,
        )
    };
    if content(old) == content(new) {
        old.references.difference(&new.references).cloned().collect()
    } else {
        old.references.union(&new.references).cloned().collect()
    }
}

fn join_references(references: &BTreeSet<String>) -> String {
    references
        .iter()
        .map(String::as_str)
        .collect::<Vec<_>>()
        .join(",")
}

fn copy_secret(
    name: &str,
    copy_namespace: &str,
    key: &str,
    (type_, data): (&str, SecretData),
    references: BTreeSet<String>,
) -> Secret {
    let annotations: BTreeMap<String, String> = [
        (keys::SECRET_SOURCE_KEY.to_owned(), key.to_owned()),
        (keys::SECRET_REFERENCES.to_owned(), join_references(&references)),
        (keys::SECRET_MODE.to_owned(), keys::MODE_BATCH.to_owned()),
    ]
    .into();
    Secret {
        metadata: ObjectMeta {
            name: Some(name.to_owned()),
            namespace: Some(copy_namespace.to_owned()),
            annotations: Some(annotations),
            ..ObjectMeta::default()
        },
        type_: Some(type_.to_owned()),
        data: Some(data),
        ..Secret::default()
    }
}

/// `<source>-<6 hex>`, the same for the same source, so that two attempts create one copy.
fn copy_name(source: &Key, copies: &[&CopyView]) -> String {
    /// A name may have 253 characters; a hyphen and six digits are added.
    const MAX_SOURCE_CHARS: usize = 246;
    let start: String = source.name.chars().take(MAX_SOURCE_CHARS).collect();
    let key = source.to_string();
    let taken = |name: &str| copies.iter().any(|c| c.name == name);
    let mut names = (0_u32..).map(|round| {
        let hash = key
            .bytes()
            .chain(round.to_le_bytes())
            .fold(0x811c_9dc5_u32, |h, b| {
                (h ^ u32::from(b)).wrapping_mul(0x0100_0193)
            });
        format!("{start}-{:06x}", hash & 0x00ff_ffff)
    });
    names.find(|name| !taken(name)).unwrap_or(start)
}

fn digest(data: Option<&SecretData>) -> u64 {
    let mut hasher = DefaultHasher::new();
    for (key, value) in data.into_iter().flatten() {
        key.hash(&mut hasher);
        value.0.hash(&mut hasher);
    }
    hasher.finish()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]
    use super::*;
    use proptest::prelude::*;

    const DOCKER_CONFIG_JSON: &str = CREDENTIALS[0].0;
    const DOCKER_CFG: &str = CREDENTIALS[1].0;

    fn source(value: &str, type_: &str) -> Secret {
        let key = CREDENTIALS.into_iter().find(|(name, _)| *name == type_);
        let data = [
            (key.map_or("tls.key", |(_, key)| key), value),
            ("other", "private"),
        ];
        let data = data.map(|(key, value)| (key.to_owned(), ByteString(value.into())));
        Secret {
            metadata: ObjectMeta {
                annotations: Some([("note".into(), "{…}".into())].into()),
                labels: Some([("a".into(), "b".into())].into()),
                ..ObjectMeta::default()
            },
            type_: Some(type_.to_owned()),
            data: Some(data.into()),
            ..Secret::default()
        }
    }

    #[test]
    fn copy_holds_only_the_credentials() {
        let key = Key::namespaced("a", "s");
        let plan = plan_copy(&key, Some(&source("1", DOCKER_CONFIG_JSON)), &[], "a/j", "kdc");
        let CopyStep::Create(copy) = plan.step else {
            panic!("{:?}", plan.step)
        };
        assert_eq!(
            (plan.source, copy.metadata.labels),
            (SourceKind::Credentials, None)
        );
        let notes = copy.metadata.annotations.clone().unwrap();
        assert!(notes.keys().all(|k| k.starts_with("imagepulljobs.kruise.io/")));
        let expected = Some([(".dockerconfigjson".to_owned(), ByteString("1".into()))].into());
        assert_eq!(
            (copy.type_.as_deref(), copy.data),
            (Some(DOCKER_CONFIG_JSON), expected)
        );
    }

    #[test]
    fn secrets_of_other_types_are_not_copied() {
        let key = Key::namespaced("a", "s");
        for type_ in [
            "Opaque",
            "kubernetes.io/tls",
            "kubernetes.io/service-account-token",
        ] {
            let plan = plan_copy(&key, Some(&source("1", type_)), &[], "a/j", "kdc");
            assert_eq!(
                (plan.step, plan.source),
                (CopyStep::Nothing, SourceKind::NoCredentials),
                "{type_}"
            );
        }
        let empty = Secret {
            data: None,
            ..source("1", DOCKER_CONFIG_JSON)
        };
        assert_eq!(
            plan_copy(&key, Some(&empty), &[], "a/j", "kdc").source,
            SourceKind::NoCredentials
        );
        // A copy from an earlier release is deleted.
        let old = CopyView {
            type_: Some("Opaque".to_owned()),
            ..view("a/s", &["a/j"])
        };
        let plan = plan_copy(&key, Some(&source("1", "Opaque")), &[&old], "a/j", "kdc");
        assert_eq!(plan.step, CopyStep::Delete("uid".to_owned()));
    }

    fn view(source: &str, references: &[&str]) -> CopyView {
        CopyView {
            name: "s-1".to_owned(),
            uid: "uid".to_owned(),
            resource_version: "1".to_owned(),
            source: source.to_owned(),
            references: references.iter().map(|r| (*r).to_owned()).collect(),
            type_: Some(DOCKER_CONFIG_JSON.to_owned()),
            digest: 1,
        }
    }

    #[test]
    fn adding_a_job_affects_no_other_job() {
        let (one, both) = (view("a/s", &["a/j"]), view("a/s", &["a/j", "a/k"]));
        assert!(affected_jobs(Some(&one), Some(&both)).is_empty());
        assert_eq!(affected_jobs(Some(&both), Some(&one)), ["a/k".to_owned()].into());
        let changed = CopyView {
            digest: 2,
            ..both.clone()
        };
        assert_eq!(affected_jobs(Some(&both), Some(&changed)), both.references);
        assert_eq!(affected_jobs(Some(&both), None), both.references);
        assert_eq!(affected_jobs(None, Some(&one)), one.references);
    }

    /// The objects of the API server.
    #[derive(Default)]
    struct FakeCluster {
        copies: BTreeMap<String, Secret>,
    }

    impl FakeCluster {
        fn views(&self) -> Vec<CopyView> {
            self.copies.values().filter_map(CopyView::from_secret).collect()
        }
        fn apply(&mut self, plan: &CopyPlan) {
            match &plan.step {
                CopyStep::Nothing => {}
                CopyStep::Create(s) | CopyStep::Replace(s) => {
                    self.copies.insert(plan.copy.clone(), (**s).clone());
                }
                CopyStep::Delete(_) => {
                    self.copies.remove(&plan.copy);
                }
            }
        }
        fn sync_copy(&mut self, key: &Key, source_secret: Option<&Secret>, job: &str) -> String {
            for _ in 0..5 {
                let views = self.views();
                let plan = plan_copy(key, source_secret, &views.iter().collect::<Vec<_>>(), job, "kdc");
                if plan.step == CopyStep::Nothing {
                    return plan.copy;
                }
                self.apply(&plan);
            }
            panic!("does not converge");
        }
        fn release(&mut self, job: &str) {
            for view in self.views() {
                let copy = self.copies.get_mut(&view.name).unwrap();
                let notes = copy.metadata.annotations.as_mut().unwrap();
                notes.insert(keys::SECRET_REFERENCES.to_owned(), references_without(&view, job));
            }
        }
    }

    proptest! {
        /// For any history of jobs and sources: after a job's reconcile its copy has the credentials of its source,
        /// there is one copy per source, and after the last job no copy names any.
        #[test]
        fn copies_follow_sources_and_jobs(ops in prop::collection::vec((0_u8..3, 0_u8..3, 0_u8..5, any::<bool>()), 1..40)) {
            let mut world = FakeCluster::default();
            for (job, src, value, leave) in ops {
                let job = format!("a/j{job}");
                if leave { world.release(&job); continue; }
                let key = Key::namespaced(["a", "b", "a"][usize::from(src)], ["s", "s", "t"][usize::from(src)]);
                let types = [DOCKER_CONFIG_JSON, DOCKER_CONFIG_JSON, DOCKER_CFG, "Opaque"];
                let source_secret = types.get(usize::from(value)).map(|type_| source(&value.to_string(), type_));
                let name = world.sync_copy(&key, source_secret.as_ref(), &job);
                let copy = world.copies.get(&name);
                let expected = source_secret.as_ref().and_then(credentials).map(|(_, data)| data);
                prop_assert_eq!(copy.and_then(|c| c.data.clone()), expected);
                let views = world.views();
                let sources: BTreeSet<_> = views.iter().map(|v| v.source.clone()).collect();
                prop_assert_eq!(sources.len(), views.len());
            }
            for job in 0..3 { world.release(&format!("a/j{job}")); }
            prop_assert!(world.views().iter().all(|copy| copy.references.is_empty()));
        }
    }
}
