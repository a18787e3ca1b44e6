//! Annotations that a policy writes.

use std::collections::BTreeMap;

use kruise_api::keys;
use kruise_api::sidecarset::SidecarSetPatchPolicy;

use super::error::Unsupported;
use super::program::{Program, add};
use super::records::{self, MAX_TEXT};
use super::sets::Peers;
use crate::sidecarset::inject::revision::Selected;
use crate::sidecarset::recorded::{hot_upgrade_names, initial_versions};
use kruise_api::cel::string;

/// What a set writes as an annotation of the user's.
#[derive(Clone, Copy, Debug)]
pub(super) struct Patch<'a> {
    /// Also if the Pod has the annotation.
    overwrite: bool,
    value: &'a str,
}

pub(super) type Patches<'a> = BTreeMap<&'a str, Patch<'a>>;

/// Annotations that record the injection.
const RECORDS: [&str; 4] = [
    keys::SIDECAR_SET_HASH,
    keys::SIDECAR_SET_HASH_WITHOUT_IMAGE,
    keys::SIDECAR_SET_INJECTED_LIST,
    keys::SIDECAR_SET_WORKING_CONTAINER,
];

/// Names in the list of injected sets, if it is read: the time to sort is limited.
const MAX_LISTED: usize = 250;

/// The annotations of `patchPodMetadata`: the result of all entries.
pub(super) fn patches<'a>(set: &'a Selected<'_>) -> Result<Patches<'a>, Unsupported> {
    let mut patches = Patches::new();
    for (at, entry) in set.spec.patch_pod_metadata.iter().flatten().enumerate() {
        let field = format!("spec.patchPodMetadata[{at}]");
        let overwrite = match &entry.patch_policy {
            None | Some(SidecarSetPatchPolicy::Retain) => false,
            Some(SidecarSetPatchPolicy::Overwrite) => true,
            Some(SidecarSetPatchPolicy::MergePatchJson) => {
                return Err(Unsupported::new(
                    &format!("{field}.patchPolicy"),
                    "is MergePatchJson, and policies cannot parse JSON",
                ));
            }
            Some(SidecarSetPatchPolicy::Other(_)) => continue,
        };
        for (key, value) in entry.annotations.iter().flatten() {
            let is_version = [
                keys::SIDECAR_SET_VERSION_PREFIX,
                keys::SIDECAR_SET_VERSION_ALT_PREFIX,
            ]
            .iter()
            .any(|prefix| key.starts_with(prefix));
            if is_version || RECORDS.contains(&key.as_str()) {
                let why = "is written by the injection itself";
                return Err(Unsupported::new(&format!("{field}.annotations[{key}]"), why));
            }
            if overwrite || !patches.contains_key(key.as_str()) {
                patches.insert(key, Patch { overwrite, value });
            }
        }
    }
    Ok(patches)
}

/// Variables with what the annotations hold before this policy.
pub(super) fn add_variables(program: &mut Program) {
    program.variable("annotations", "object.metadata.?annotations.orValue({})");
    program.variable("hashes", records::hash_records(keys::SIDECAR_SET_HASH));
    program.variable("others", records::by_policies("variables.hashes"));
    program.operation("has(object.metadata.annotations) ? [] : [JSONPatch{op: 'add', path: '/metadata/annotations', value: {}}]");
}

/// Adds the annotations of `patchPodMetadata`. Only the set that would have the last word among all that apply to the Pod
/// writes an annotation, so that the order of policies does not matter.
pub(super) fn add_patches(patches: &Patches<'_>, peers: &Peers<'_>, program: &mut Program) {
    for (key, patch) in patches {
        let mut conditions: Vec<String> = Vec::new();
        if !patch.overwrite {
            conditions.push(format!("!({} in variables.annotations)", string(key)));
        }
        for (at, before, variant) in peers.all() {
            let others = self::patches(&variant.selected).unwrap_or_default();
            let wins = others
                .get(key)
                .is_some_and(|other| other.overwrite == patch.overwrite && before != patch.overwrite);
            if wins {
                conditions.push(format!(
                    "!({})",
                    applies(at, variant.condition.as_ref(), peers, program)
                ));
            }
        }
        let add = add(&path(key), &string(patch.value));
        program.operation(match conditions.as_slice() {
            [] => format!("[{add}]"),
            all => format!("{} ? [{add}] : []", all.join(" && ")),
        });
    }
}

pub(super) fn applies(
    at: usize,
    condition: Option<&String>,
    peers: &Peers<'_>,
    program: &mut Program,
) -> String {
    let peer = program.peer(at, peers);
    match condition {
        Some(condition) => format!("{peer} && {condition}"),
        None => peer,
    }
}

/// The value of an annotation, empty without it, after the patches of all sets.
pub(super) fn value_of(key: &str, patches: &Patches<'_>, peers: &Peers<'_>, program: &mut Program) -> String {
    let mut all: Vec<(Option<String>, bool, String)> = Vec::new();
    let own = patches
        .get(key)
        .map(|patch| (None, patch.overwrite, string(patch.value)));
    let mut own_due = own;
    for (at, before, variant) in peers.all() {
        if !before {
            all.extend(own_due.take());
        }
        let others = self::patches(&variant.selected).unwrap_or_default();
        if let Some(patch) = others.get(key) {
            let applies = applies(at, variant.condition.as_ref(), peers, program);
            all.push((Some(applies), patch.overwrite, string(patch.value)));
        }
    }
    all.extend(own_due);
    // The first one that retains counts, and the last one that overwrites.
    let mut value = "''".to_owned();
    for (condition, _, new) in all.iter().rev().filter(|(_, overwrite, _)| !overwrite) {
        value = choose(condition.as_deref(), new, &value);
    }
    value = format!("variables.annotations[?{}].orValue({value})", string(key));
    for (condition, _, new) in all.iter().filter(|(_, overwrite, _)| *overwrite) {
        value = choose(condition.as_deref(), new, &value);
    }
    value
}

fn choose(condition: Option<&str>, value: &str, otherwise: &str) -> String {
    condition.map_or_else(
        || value.to_owned(),
        |condition| format!("({condition} ? {value} : {otherwise})"),
    )
}

/// Records the injection. `hot` has the names of sidecars with hot upgrade.
pub(super) fn add_records(set: &Selected<'_>, hot: &[String], program: &mut Program) {
    let [record, without_image] = set.records(None);
    let without_images = records::hash_records(keys::SIDECAR_SET_HASH_WITHOUT_IMAGE);
    let without_images = program.variable("hashesWithoutImages", without_images);
    for (key, entries, record) in [
        (keys::SIDECAR_SET_HASH, "variables.hashes", record),
        (
            keys::SIDECAR_SET_HASH_WITHOUT_IMAGE,
            &without_images,
            without_image,
        ),
    ] {
        let entry = (set.name.to_owned(), kruise_api::go_json::to_json(&record));
        let entries = program.variable(
            format!("{}Written", variable_name(entries)),
            records::as_written(entries),
        );
        add_text(key, &records::map_with(&entries, &[entry]), program);
    }

    let listed = format!(
        "variables.annotations[?{}].orValue('')",
        string(keys::SIDECAR_SET_INJECTED_LIST)
    );
    let listed = format!(
        "(({listed} == '' || {listed}.size() > {MAX_TEXT} || {listed}.split(',').size() > {MAX_LISTED} ? [] : {listed}.split(',')) + [{}]).sort()",
        string(set.name)
    );
    let names = program.variable("injected", listed);
    // `distinct` compares each with each.
    let listed = format!(
        "lists.range({names}.size()).filter(i, i == 0 || {names}[i] != {names}[i - 1]).map(i, {names}[i]).join(',')"
    );
    add_text(keys::SIDECAR_SET_INJECTED_LIST, &listed, program);

    if hot.is_empty() {
        return;
    }
    // An init container and a container may have the same name.
    let mut entries = BTreeMap::new();
    for sidecar in hot {
        let names = hot_upgrade_names(sidecar);
        for (key, version) in initial_versions(&names) {
            program.operation(format!("[{}]", add(&path(&key), &string(version))));
        }
        let [first, _] = &names;
        entries.insert(sidecar.clone(), kruise_api::go_json::to_json(first));
    }
    let working = program.variable("working", records::working(keys::SIDECAR_SET_WORKING_CONTAINER));
    let text = records::map_with(&working, &entries.into_iter().collect::<Vec<_>>());
    add_text(keys::SIDECAR_SET_WORKING_CONTAINER, &text, program);
}

/// Writes an annotation. Its text is a variable, because the time for each expression is limited.
fn add_text(key: &str, text: &str, program: &mut Program) {
    let text = program.variable(format!("text{}", program.variables.len()), text);
    program.operation(format!("[{}]", add(&path(key), &text)));
}

/// The name in a reference to a variable.
fn variable_name(reference: &str) -> &str {
    reference.strip_prefix("variables.").unwrap_or(reference)
}

/// Path of an annotation in JSON patches (RFC 6901), as a literal.
fn path(key: &str) -> String {
    string(&format!(
        "/metadata/annotations/{}",
        key.replace('~', "~0").replace('/', "~1")
    ))
}
